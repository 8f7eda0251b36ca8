//! A pool of slots with one conversation each: how long each text is, and whether its state is usable. The states
//! themselves are in a device's memory, behind [`SlotStates`].

use std::sync::Arc;

use crate::error::{ModelError, SlotError};
use crate::language_model::{SharedState, Transfer};
use crate::layout::StateLayout;
use crate::memory::Denominators;

type Result<T> = std::result::Result<T, ModelError>;

/// The length of a slot's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TextLength {
    /// All tokens read, including those of the source.
    pub tokens: u64,
    /// Tokens of the source; 0 for a decoder-only model.
    pub source: u64,
}

/// The states of a pool's slots in one device's memory. The pool checks every slot and length before it calls.
pub trait SlotStates: Send {
    /// The layout of an exported state.
    fn layout(&self) -> StateLayout;

    /// Bytes per slot, however long its text is.
    fn slot_bytes(&self) -> usize;

    /// The denominators of all slots since the pool was created.
    fn denominators(&self) -> Denominators;

    /// Whether the device has failed permanently.
    fn is_lost(&self) -> bool {
        false
    }

    /// Returns the length of the text with `tokens` tokens and this exported state.
    ///
    /// # Errors
    /// The elements are not a state of this model: they contain a maximum or a count that no text has.
    fn length_of(&self, _numbers: &[f32], tokens: u64) -> Result<TextLength> {
        Ok(TextLength { tokens, source: 0 })
    }

    /// Zeroes a slot.
    ///
    /// # Errors
    /// The device failed.
    fn clear(&mut self, slot: usize) -> Result<()>;

    /// Returns a copy of a slot's state.
    ///
    /// # Errors
    /// The device failed.
    fn read(&self, slot: usize, length: TextLength) -> Result<Vec<f32>>;

    /// Replaces a slot's state.
    ///
    /// # Errors
    /// The device failed.
    fn write(&mut self, slot: usize, numbers: &[f32], length: TextLength) -> Result<()>;

    /// Starts a [`Self::read`].
    ///
    /// # Errors
    /// The device failed.
    fn start_read(&mut self, slot: usize, length: TextLength) -> Result<Transfer> {
        self.read(slot, length).map(Transfer::Done)
    }

    /// Starts a [`Self::write`].
    ///
    /// # Errors
    /// The device failed.
    fn start_write(&mut self, slot: usize, state: SharedState, length: TextLength) -> Result<Transfer> {
        self.write(slot, (*state).as_ref(), length).map(|()| Transfer::Done(Vec::new()))
    }

    /// Returns the progress of a transfer that was [`Transfer::Pending`].
    ///
    /// # Errors
    /// The device failed; then the transfer has ended.
    fn poll(&mut self, _slot: usize) -> Result<Transfer> {
        Ok(Transfer::Pending)
    }

    /// Sets a callback that runs, on any thread, whenever a pending transfer ends.
    fn on_transfer_end(&mut self, _wake: Arc<dyn Fn() + Send + Sync>) {}
}

/// Whether a slot's state is usable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Status {
    #[default]
    Ready,
    /// A step or a write has started but not succeeded.
    Incomplete,
    /// A step has read this many drafts, and none has been kept yet.
    Drafted(usize),
    Exporting,
    /// The text will have this length once the import ends.
    Importing(TextLength),
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    length: TextLength,
    status: Status,
}

/// Slots for conversations, allocated once and addressed by index.
#[derive(Debug)]
pub struct Pool<S> {
    pub(crate) states: S,
    slots: Vec<Slot>,
    /// Whether texts start with a source.
    needs_source: bool,
}

impl<S: SlotStates> Pool<S> {
    /// A pool of empty texts, in `states` with the same number of slots.
    pub(crate) fn of(states: S, slots: usize, needs_source: bool) -> Self {
        Self { states, slots: vec![Slot::default(); slots], needs_source }
    }

    /// Number of conversations that fit.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Tokens that a slot has read since its last reset, including those of its source; 0 if there is no such slot.
    pub fn tokens(&self, slot: usize) -> u64 {
        self.slots.get(slot).map_or(0, |slot| slot.length.tokens)
    }

    /// Bytes per slot, however long its text is.
    pub fn state_bytes(&self) -> usize {
        self.states.slot_bytes()
    }

    /// The denominators of all slots since the pool was created. A probed step is only counted in its probe.
    pub fn denominators(&self) -> Denominators {
        self.states.denominators()
    }

    /// The layout of the states that [`Self::export`] returns.
    pub fn layout(&self) -> StateLayout {
        self.states.layout()
    }

    /// Whether the device has failed permanently: every later call in this process fails too.
    pub fn is_lost(&self) -> bool {
        self.states.is_lost()
    }

    /// Resets a slot to an empty text.
    ///
    /// # Errors
    /// There is no such slot, its state is in transfer, or the device failed.
    pub fn reset(&mut self, slot: usize) -> Result<()> {
        self.check(slot)?;
        self.slots[slot].status = Status::Incomplete;
        self.states.clear(slot)?;
        self.slots[slot] = Slot::default();
        Ok(())
    }

    /// Returns a copy of a slot's state, in the order of [`StateLayout`]. A pool on another device can import it too.
    ///
    /// # Errors
    /// There is no such slot, its state is incomplete or in transfer, or the device failed.
    pub fn export(&self, slot: usize) -> Result<Vec<f32>> {
        let length = self.check_ready(slot)?;
        self.states.read(slot, length)
    }

    /// Replaces a slot's state with one from [`Self::export`], whose text has `tokens` tokens. Elements that are held
    /// as bf16 are rounded to nearest.
    ///
    /// # Errors
    /// After these errors nothing has changed: there is no such slot, its state is in transfer, `numbers` does not have
    /// the layout's length, or it is not a state of this model (for example, a key maximum that no key has, or a source
    /// of another length). A maximum that is too low is accepted: the next key replaces it, and earlier tokens are
    /// forgotten. After a device error the slot must be reset.
    pub fn import(&mut self, slot: usize, numbers: &[f32], tokens: u64) -> Result<()> {
        let length = self.check_import(slot, numbers, tokens)?;
        self.slots[slot].status = Status::Incomplete;
        self.states.write(slot, numbers, length)?;
        self.set(slot, length);
        Ok(())
    }

    /// Starts an [`Self::export`]. While it is pending, every other call rejects the slot; other slots can be used.
    ///
    /// # Errors
    /// As for [`Self::export`]; then no transfer is in progress.
    pub fn start_export(&mut self, slot: usize) -> Result<Transfer> {
        let length = self.check_ready(slot)?;
        let transfer = self.states.start_read(slot, length)?;
        if matches!(transfer, Transfer::Pending) {
            self.slots[slot].status = Status::Exporting;
        }
        Ok(transfer)
    }

    /// Starts an [`Self::import`]. While it is pending, every other call rejects the slot; other slots can be used.
    ///
    /// # Errors
    /// As for [`Self::import`]; then no transfer is in progress, and nothing has changed.
    pub fn start_import(&mut self, slot: usize, state: SharedState, tokens: u64) -> Result<Transfer> {
        let length = self.check_import(slot, (*state).as_ref(), tokens)?;
        let transfer = self.states.start_write(slot, state, length)?;
        match transfer {
            Transfer::Pending => self.slots[slot].status = Status::Importing(length),
            Transfer::Done(_) => self.set(slot, length),
        }
        Ok(transfer)
    }

    /// Returns the progress of a slot's transfer, without waiting.
    ///
    /// # Errors
    /// No transfer is in progress, or the device failed. After a device failure, an exported slot still has its state,
    /// and an imported one must be reset.
    pub fn poll_transfer(&mut self, slot: usize) -> Result<Transfer> {
        let (length, after_failure) = match self.slots.get(slot) {
            Some(&Slot { length, status: Status::Exporting }) => (length, Status::Ready),
            Some(&Slot { status: Status::Importing(length), .. }) => (length, Status::Incomplete),
            _ => return Err(ModelError::Slot { slot, reason: SlotError::NoTransfer }),
        };
        let transfer = self.states.poll(slot);
        match &transfer {
            Ok(Transfer::Pending) => {}
            Ok(Transfer::Done(_)) => self.set(slot, length),
            Err(_) => self.slots[slot].status = after_failure,
        }
        transfer
    }

    /// Sets a callback that runs, on any thread, whenever a pending transfer ends. Call it before the first transfer.
    pub fn on_transfer_end(&mut self, wake: Arc<dyn Fn() + Send + Sync>) {
        self.states.on_transfer_end(wake);
    }

    /// Starts a step of these slots. They are incomplete until [`Self::advance`].
    ///
    /// # Errors
    /// A slot is out of range, named twice, incomplete, in transfer, or lacks the source that its text continues;
    /// nothing has changed.
    pub(crate) fn begin(&mut self, slots: &[usize]) -> Result<()> {
        for (i, &slot) in slots.iter().enumerate() {
            let Err(error) = self.check_step(slot) else {
                self.slots[slot].status = Status::Incomplete;
                continue;
            };
            for &slot in &slots[..i] {
                self.slots[slot].status = Status::Ready;
            }
            let repeated = slots[..i].contains(&slot);
            return Err(if repeated { ModelError::Slot { slot, reason: SlotError::Duplicate } } else { error });
        }
        Ok(())
    }

    /// Ends a step in which each of `slots` has read `tokens` drafts. They do not count as read until they are kept.
    pub(crate) fn drafted(&mut self, slots: &[usize], tokens: usize) {
        for &slot in slots {
            self.slots[slot].status = Status::Drafted(tokens);
        }
    }

    /// Starts to keep `count` drafts of a slot, which is incomplete until [`Self::advance`]. Returns the number of
    /// drafts. If the slot has fewer than `count` drafts, there is an error and nothing has changed.
    pub(crate) fn begin_keeping(&mut self, slot: usize, count: usize) -> Result<usize> {
        let Slot { status: Status::Drafted(tokens), .. } = self.check(slot)? else {
            return Err(ModelError::Slot { slot, reason: SlotError::NoDrafts });
        };
        if count == 0 || count > tokens {
            return Err(ModelError::argument("kept drafts", format!("1 to {tokens}"), count));
        }
        self.slots[slot].status = Status::Incomplete;
        Ok(tokens)
    }

    /// Ends a step in which each of `slots` has read `tokens` tokens.
    pub(crate) fn advance(&mut self, slots: &[usize], tokens: usize) {
        for &slot in slots {
            self.slots[slot].length.tokens += tokens as u64;
            self.slots[slot].status = Status::Ready;
        }
    }

    /// The position of each slot's next token, counted from the end of the source.
    pub(crate) fn positions(&self, slots: &[usize]) -> impl Iterator<Item = u64> {
        slots.iter().map(|&slot| self.slots[slot].length).map(|length| length.tokens - length.source)
    }

    /// Resets a slot, which then is incomplete until [`Self::source_was_read`].
    pub(crate) fn begin_source(&mut self, slot: usize) -> Result<()> {
        self.reset(slot)?;
        self.slots[slot].status = Status::Incomplete;
        Ok(())
    }

    /// Records that a slot's text is a source of `tokens` tokens, which the caller has encoded into the slot.
    pub(crate) fn source_was_read(&mut self, slot: usize, tokens: usize) {
        self.set(slot, TextLength { tokens: tokens as u64, source: tokens as u64 });
    }

    /// Sets the length of a slot whose state the caller has written.
    pub(crate) fn set(&mut self, slot: usize, length: TextLength) {
        self.slots[slot] = Slot { length, status: Status::Ready };
    }

    /// Checks that a slot exists and is not in transfer.
    fn check(&self, slot: usize) -> Result<Slot> {
        let reason = match self.slots.get(slot) {
            None => SlotError::OutOfRange(self.slots.len()),
            Some(Slot { status: Status::Exporting | Status::Importing(_), .. }) => SlotError::InTransfer,
            Some(slot) => return Ok(*slot),
        };
        Err(ModelError::Slot { slot, reason })
    }

    /// Checks that a slot's state is usable, and returns its text's length.
    pub(crate) fn check_ready(&self, slot: usize) -> Result<TextLength> {
        match self.check(slot)? {
            Slot { status: Status::Incomplete, .. } => Err(ModelError::Slot { slot, reason: SlotError::Incomplete }),
            Slot { status: Status::Drafted(_), .. } => Err(ModelError::Slot { slot, reason: SlotError::Drafted }),
            ready => Ok(ready.length),
        }
    }

    fn check_step(&self, slot: usize) -> Result<()> {
        if self.check_ready(slot)?.source == 0 && self.needs_source {
            return Err(ModelError::Slot { slot, reason: SlotError::NoSource });
        }
        Ok(())
    }

    fn check_import(&self, slot: usize, numbers: &[f32], tokens: u64) -> Result<TextLength> {
        self.check(slot)?;
        let (found, bound) = (numbers.len(), self.layout().numbers());
        if found != bound {
            return Err(ModelError::argument("a state", format!("{bound} numbers long"), found));
        }
        self.states.length_of(numbers, tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nothing;

    impl SlotStates for Nothing {
        fn layout(&self) -> StateLayout {
            StateLayout { layers: 0, heads: 0, head: 0, taps: 0, channels: 0, cross: 0 }
        }

        fn slot_bytes(&self) -> usize {
            0
        }

        fn denominators(&self) -> Denominators {
            Denominators::default()
        }

        fn clear(&mut self, _: usize) -> Result<()> {
            Ok(())
        }

        fn read(&self, _: usize, _: TextLength) -> Result<Vec<f32>> {
            Ok(Vec::new())
        }

        fn write(&mut self, _: usize, _: &[f32], _: TextLength) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_slot_left_incomplete_by_a_failed_step_is_refused_until_it_is_reset() {
        let mut pool = Pool::of(Nothing, 3, false);
        pool.begin(&[0, 2]).unwrap();
        let error = pool.begin(&[1, 2]).unwrap_err().to_string();
        assert!(error.contains("slot 2") && error.contains("reset"), "{error}");
        assert!(pool.begin(&[1, 1]).unwrap_err().to_string().contains("twice"));
        pool.begin(&[1]).unwrap();
        pool.advance(&[1], 5);
        pool.begin(&[1]).unwrap();
        pool.reset(2).unwrap();
        pool.begin(&[2]).unwrap();
        assert_eq!((pool.tokens(0), pool.tokens(1)), (0, 5));
    }
}
