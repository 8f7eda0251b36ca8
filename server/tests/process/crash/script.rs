//! The steps of the lanes, which are the same in every run, whatever ids the server assigns.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// One step of a lane.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    /// Create a session with a seed.
    Create { seed: u64 },
    /// A turn. With an empty text, it continues the answer.
    Turn { text: &'static str, tokens: u64, temperature: f64, stop: Option<&'static str>, stream: bool },
    /// Append text without an answer.
    Append { text: &'static str },
    /// Rewind by this many versions.
    Rewind { back: usize },
    /// Fork from this many versions ago. The lane continues with the fork.
    Fork { back: usize },
    /// Delete the session that the lane has abandoned.
    Delete,
}

const TEXTS: [&str; 8] = [
    "Once upon a time",
    " The fox said nothing.",
    "“Where have you been?”",
    " It was late, and the wind",
    " 雨が降っていた。",
    " Then the old lighthouse keeper",
    " But who could know?",
    "\n\nThe next morning",
];

const STOPS: [&str; 3] = [".", " the", "\n"];

/// The endless steps of lane `number`.
pub(crate) struct Script {
    random: StdRng,
    last: Option<Step>,
    /// Versions to which the current session can be rewound.
    versions: usize,
}

impl Script {
    pub(crate) fn new(number: usize) -> Self {
        Self { random: StdRng::seed_from_u64(number as u64), last: None, versions: 0 }
    }

    pub(crate) fn next(&mut self) -> Step {
        let step = self.choose();
        match &step {
            Step::Turn { .. } | Step::Append { .. } => self.versions += 1,
            Step::Fork { .. } => self.versions = 1,
            Step::Create { .. } | Step::Rewind { .. } | Step::Delete => {}
        }
        self.last = Some(step.clone());
        step
    }

    fn choose(&mut self) -> Step {
        let random = &mut self.random;
        let text = TEXTS[random.random_range(0..TEXTS.len())];
        let tokens = random.random_range(1..=12);
        let back = random.random_range(0..self.versions.clamp(1, 4));
        let plain = matches!(self.last, Some(Step::Turn { stop: None, .. }));
        match (&self.last, random.random_range(0..20)) {
            (None, _) => Step::Create { seed: random.random() },
            (Some(Step::Fork { .. }), _) => Step::Delete,
            (Some(Step::Create { .. }), _) | (_, 0..=11) => Step::Turn {
                text: if plain && random.random_bool(0.5) { "" } else { text },
                tokens,
                temperature: [0.0, 0.7, 1.3][random.random_range(0..3)],
                stop: random.random_bool(0.3).then(|| STOPS[random.random_range(0..STOPS.len())]),
                stream: random.random(),
            },
            (_, 12..=14) => Step::Append { text },
            (_, 15..=17) => Step::Rewind { back },
            _ => Step::Fork { back },
        }
    }
}
