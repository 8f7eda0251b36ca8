//! The unclaimed pieces of a job, in one word, and the two ends from which threads claim them.

/// The end from which a thread claims pieces.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    First,
    Last,
}

/// The unclaimed pieces of job `number`, from `first` to before `end`, which fit into one atomic word.
#[derive(Clone, Copy, Debug)]
pub(super) struct Open {
    pub(super) number: u32,
    first: u16,
    end: u16,
}

impl Open {
    /// The most pieces of a job.
    pub(super) const MOST: usize = u16::MAX as usize;

    /// Returns all pieces of a job, at most [`Self::MOST`].
    pub(super) fn all(number: u32, pieces: usize) -> Self {
        Self { number, first: 0, end: pieces as u16 }
    }

    pub(super) fn of(word: u64) -> Self {
        Self { number: (word >> 32) as u32, first: (word >> 16) as u16, end: word as u16 }
    }

    pub(super) fn word(self) -> u64 {
        u64::from(self.number) << 32 | u64::from(self.first) << 16 | u64::from(self.end)
    }

    pub(super) fn is_empty(self) -> bool {
        self.first == self.end
    }

    /// Returns the piece at one end, and what then remains unclaimed.
    pub(super) fn claimed(self, end: End) -> (usize, Self) {
        match end {
            End::First => (self.first.into(), Self { first: self.first + 1, ..self }),
            End::Last => (usize::from(self.end) - 1, Self { end: self.end - 1, ..self }),
        }
    }
}
