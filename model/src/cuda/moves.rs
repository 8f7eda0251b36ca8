//! States that leave a pool's slots, or come to them, while the other slots go on. A slot whose state is on its way takes
//! part in nothing else, so that no copy of it has to be made on the device.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

use candle_core::bail;

use super::device::Result;
use super::mover::{Job, Mover, Wake, Way, ended};
use super::pool::CudaPool;
use crate::language_model::SharedState;

/// The moves of a pool's slots, at most one of each.
#[derive(Debug)]
pub(super) struct Moves {
    /// None before the first move.
    mover: Option<Mover>,
    wake: Wake,
    under_way: Vec<Option<UnderWay>>, // (slots)
}

#[derive(Debug)]
struct UnderWay {
    told: Receiver<Result<Vec<f32>>>,
    /// Tokens of the state that is to come; none where one leaves.
    tokens: Option<u64>,
}

impl Moves {
    pub(super) fn new(slots: usize) -> Self {
        Self { mover: None, wake: Wake(Arc::new(|| {})), under_way: (0..slots).map(|_| None).collect() }
    }

    pub(super) fn is_moving(&self, slot: usize) -> bool {
        self.under_way.get(slot).is_some_and(Option::is_some)
    }
}

impl CudaPool {
    /// Has `wake` called, on another thread, whenever a move has ended: for who would sleep till then. To be said before
    /// the first move.
    pub fn on_transfer_end(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.moves.wake = Wake(wake);
    }

    /// Begins to take a slot's numbers off the device, as [`Self::export`] gives them. Until [`Self::poll_transfer`] has told of
    /// the end, the slot is refused to all else, and the others go on.
    ///
    /// # Errors
    /// As for [`Self::export`]: then nothing has begun.
    pub fn start_export(&mut self, slot: usize) -> candle_core::Result<()> {
        self.check_whole(slot)?;
        self.ask(slot, Way::Out, None).map_err(|error| self.told(error))
    }

    /// Begins to put numbers into a slot, as [`Self::import`] does. Until [`Self::poll_transfer`] has told of the end, the slot
    /// is refused to all else, and the others go on.
    ///
    /// # Errors
    /// As for [`Self::import`]: then nothing has begun, and nothing changed.
    pub fn start_import(&mut self, slot: usize, numbers: SharedState, tokens: u64) -> candle_core::Result<()> {
        self.check(slot)?;
        self.check_numbers((*numbers).as_ref())?;
        self.ask(slot, Way::In(numbers), Some(tokens)).map_err(|error| self.told(error))?;
        self.torn[slot] = true;
        Ok(())
    }

    /// The end of the move that was begun of a slot: the numbers that it took off the device, none where it put some
    /// there. `None` while it is under way; never waits.
    ///
    /// # Errors
    /// When the device failed: a slot whose state was to leave still has it; one that was to have another is refused
    /// until it is reset. Or when no move was begun.
    pub fn poll_transfer(&mut self, slot: usize) -> candle_core::Result<Option<Vec<f32>>> {
        let Some(UnderWay { told, tokens }) = self.moves.under_way.get(slot).and_then(Option::as_ref) else {
            bail!("no move of slot {slot} has begun");
        };
        let outcome = match told.try_recv() {
            Ok(outcome) => outcome,
            Err(TryRecvError::Empty) => return Ok(None),
            Err(TryRecvError::Disconnected) => Err(ended("it has ended before the move")),
        };
        let tokens = *tokens;
        self.moves.under_way[slot] = None;
        let numbers = outcome.map_err(|error| self.told(error))?;
        if let Some(tokens) = tokens {
            (self.tokens[slot], self.torn[slot]) = (tokens, false);
        }
        Ok(Some(numbers))
    }

    fn ask(&mut self, slot: usize, way: Way, tokens: Option<u64>) -> Result<()> {
        // What was asked for before may still read the slot, or write to it.
        let after = self.device.0.moment()?;
        let mover = match self.moves.mover.take() {
            Some(mover) => mover,
            None => Mover::start(Arc::clone(&self.device.0), self.shape, self.moves.wake.clone())?,
        };
        let (tell, told) = channel();
        // A thread that has ended is not kept: the next move begins another.
        mover.ask(Job { after, parts: self.parts(slot), way, told: tell })?;
        self.moves.mover = Some(mover);
        self.moves.under_way[slot] = Some(UnderWay { told, tokens });
        Ok(())
    }
}
