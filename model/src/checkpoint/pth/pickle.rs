//! Reads the tensor descriptions from the pickle in a `.pth` file. A pickle is a program for a stack machine; this
//! reader never calls anything that it names. It accepts only the instructions and names that build dictionaries of
//! tensors, and what PyTorch writes next to them. Every other instruction or name is an error.
//!
//! Candle's reader is not safe for untrusted files: it copies memo values, so a few bytes can ask for any amount of
//! memory; it recurses without a limit; and it panics on short argument lists. Here a value is small: compound values
//! are indices into lists, so memory use is bounded by the length of the pickle.

use std::collections::HashMap;

/// Calls of these names build tensors and dictionaries.
const REBUILD_TENSOR: (&str, &str) = ("torch._utils", "_rebuild_tensor_v2");
const REBUILD_PARAMETER: (&str, &str) = ("torch._utils", "_rebuild_parameter");
const ORDERED_DICT: (&str, &str) = ("collections", "OrderedDict");

/// The maximum number of dimensions. Each tensor has its own copy of its shape and strides, even if the pickle repeats
/// one from its memo, so a limit is needed to bound memory.
const MOST_DIMENSIONS: usize = 8;

/// A tensor as the pickle describes it.
#[derive(Clone, Debug)]
pub(super) struct Tensor<'a> {
    /// The class of its storage, such as `BFloat16Storage`.
    pub(super) class: &'a str,
    /// The name of its storage in the archive.
    pub(super) storage: &'a str,
    /// Elements in its storage, and the offset of its first element there.
    pub(super) numbers: usize,
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

/// A value on the stack. Indices point into the lists of [`Machine`].
#[derive(Clone, Copy, Debug, PartialEq)]
enum Value<'a> {
    Mark,
    /// None, true, false and floats, which do not affect the result.
    Other,
    Int(i64),
    Text(&'a str),
    Global(&'a str, &'a str),
    Tuple(usize),
    Dict(usize),
    Storage(usize),
    Tensor(usize),
}

struct Storage<'a> {
    class: &'a str,
    name: &'a str,
    numbers: usize,
}

#[derive(Default)]
struct Machine<'a> {
    stack: Vec<Value<'a>>,
    memo: HashMap<u32, Value<'a>>,
    tuples: Vec<Vec<Value<'a>>>,
    dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    storages: Vec<Storage<'a>>,
    tensors: Vec<Tensor<'a>>,
}

/// Returns the tensors, with their names, of the dictionary that a pickle builds.
pub(super) fn tensors(pickle: &[u8]) -> Result<Vec<(&str, Tensor<'_>)>, String> {
    let (mut machine, mut rest) = (Machine::default(), pickle);
    loop {
        let at = pickle.len() - rest.len();
        let [instruction, after @ ..] = rest else { return Err("the pickle has no end".into()) };
        rest = after;
        if *instruction == b'.' {
            break;
        }
        machine.step(*instruction, &mut rest).map_err(|reason| format!("the pickle at byte {at}: {reason}"))?;
    }
    let Some(Value::Dict(dict)) = machine.stack.pop() else {
        return Err("the pickle must make a dictionary of tensors".into());
    };
    let mut found = Vec::new();
    for (name, value) in &machine.dicts[dict] {
        match (name, value) {
            (Value::Text(name), Value::Tensor(tensor)) => found.push((*name, machine.tensors[*tensor].clone())),
            (Value::Text(name), _) => return Err(format!("{} must be a tensor", shown(name))),
            _ => return Err("names of tensors must be texts".into()),
        }
    }
    Ok(found)
}

/// Escapes a name from the file for an error message.
pub(super) fn shown(name: &str) -> String {
    name.chars().take(64).flat_map(char::escape_debug).collect()
}

fn take<'a>(rest: &mut &'a [u8], count: usize) -> Result<&'a [u8], String> {
    let (taken, after) = rest.split_at_checked(count).ok_or("ends too early")?;
    *rest = after;
    Ok(taken)
}

/// Reads an unsigned little-endian integer.
fn unsigned(rest: &mut &[u8], bytes: usize) -> Result<u64, String> {
    Ok(take(rest, bytes)?.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

fn text<'a>(rest: &mut &'a [u8], length: u64) -> Result<&'a str, String> {
    let bytes = take(rest, usize::try_from(length).map_err(|_| "ends too early")?)?;
    std::str::from_utf8(bytes).map_err(|_| "a text is not UTF-8".into())
}

fn line<'a>(rest: &mut &'a [u8]) -> Result<&'a str, String> {
    let end = rest.iter().position(|byte| *byte == b'\n').ok_or("ends too early")?;
    let line = text(rest, end as u64)?;
    take(rest, 1)?;
    Ok(line)
}

impl<'a> Machine<'a> {
    fn step(&mut self, instruction: u8, rest: &mut &'a [u8]) -> Result<(), String> {
        match instruction {
            // The protocol version and the length of a frame.
            0x80 => drop(take(rest, 1)?),
            0x95 => drop(take(rest, 8)?),
            b'(' => self.stack.push(Value::Mark),
            b'N' | 0x88 | 0x89 => self.stack.push(Value::Other),
            b'G' => {
                take(rest, 8)?;
                self.stack.push(Value::Other);
            }
            b'K' => self.int(rest, 1)?,
            b'M' => self.int(rest, 2)?,
            b'J' => {
                let number = unsigned(rest, 4)? as u32;
                self.stack.push(Value::Int(i64::from(number.cast_signed())));
            }
            0x8a => self.long(rest)?,
            b'X' => {
                let length = unsigned(rest, 4)?;
                self.stack.push(Value::Text(text(rest, length)?));
            }
            0x8c => {
                let length = unsigned(rest, 1)?;
                self.stack.push(Value::Text(text(rest, length)?));
            }
            b'c' => {
                let global = Value::Global(line(rest)?, line(rest)?);
                self.stack.push(global);
            }
            0x93 => match self.popped()? {
                [Value::Text(module), Value::Text(name)] => self.stack.push(Value::Global(module, name)),
                _ => return Err("the name of a class must be two texts".into()),
            },
            b'q' => self.remember(unsigned(rest, 1)? as u32)?,
            b'r' => self.remember(unsigned(rest, 4)? as u32)?,
            0x94 => self.remember(self.memo.len() as u32)?,
            b'h' => self.recall(unsigned(rest, 1)? as u32)?,
            b'j' => self.recall(unsigned(rest, 4)? as u32)?,
            b')' => self.tuple(Vec::new()),
            0x85 => {
                let parts: [_; 1] = self.popped()?;
                self.tuple(parts.into());
            }
            0x86 => {
                let parts: [_; 2] = self.popped()?;
                self.tuple(parts.into());
            }
            0x87 => {
                let parts: [_; 3] = self.popped()?;
                self.tuple(parts.into());
            }
            b't' => {
                let parts = self.popped_to_mark()?;
                self.tuple(parts);
            }
            b'}' => self.dict(),
            b's' => {
                let [name, value] = self.popped()?;
                self.top_dict()?.push((name, value));
            }
            b'u' => {
                let parts = self.popped_to_mark()?;
                let (pairs, odd) = parts.as_chunks::<2>();
                if !odd.is_empty() {
                    return Err("a name has no value".into());
                }
                self.top_dict()?.extend(pairs.iter().map(|&[name, value]| (name, value)));
            }
            // The attributes of a dictionary, such as the versions of submodules.
            b'b' => drop(self.popped::<1>()?),
            b'Q' => self.persistent()?,
            b'R' => self.call()?,
            other => return Err(format!("instruction 0x{other:02x} is not one that a file of tensors needs")),
        }
        Ok(())
    }

    fn int(&mut self, rest: &mut &'a [u8], bytes: usize) -> Result<(), String> {
        let number = unsigned(rest, bytes)?;
        self.stack.push(Value::Int(number.cast_signed()));
        Ok(())
    }

    /// Reads a signed little-endian integer of at most eight bytes.
    fn long(&mut self, rest: &mut &'a [u8]) -> Result<(), String> {
        let length = unsigned(rest, 1)? as usize;
        if length > 8 {
            return Err(format!("a number has {length} bytes, the maximum is 8"));
        }
        let (number, unused) = (unsigned(rest, length)?, 64 - 8 * length as u32);
        let number = number.checked_shl(unused).map_or(0, |number| number.cast_signed() >> unused);
        self.stack.push(Value::Int(number));
        Ok(())
    }

    /// Pops the last values, in the order in which they were pushed.
    fn popped<const N: usize>(&mut self) -> Result<[Value<'a>; N], String> {
        let values = self.stack.last_chunk::<N>().copied().filter(|values| !values.contains(&Value::Mark));
        let values = values.ok_or("the stack has too few values")?;
        self.stack.truncate(self.stack.len() - N);
        Ok(values)
    }

    fn popped_to_mark(&mut self) -> Result<Vec<Value<'a>>, String> {
        let mark = self.stack.iter().rposition(|value| *value == Value::Mark).ok_or("the stack has no mark")?;
        let values = self.stack.split_off(mark + 1);
        self.stack.truncate(mark);
        Ok(values)
    }

    fn remember(&mut self, id: u32) -> Result<(), String> {
        let value = self.stack.last().filter(|value| **value != Value::Mark).ok_or("the stack has too few values")?;
        self.memo.insert(id, *value);
        Ok(())
    }

    fn recall(&mut self, id: u32) -> Result<(), String> {
        let value = self.memo.get(&id).ok_or_else(|| format!("the memo has no value {id}"))?;
        self.stack.push(*value);
        Ok(())
    }

    fn tuple(&mut self, parts: Vec<Value<'a>>) {
        self.tuples.push(parts);
        self.stack.push(Value::Tuple(self.tuples.len() - 1));
    }

    fn dict(&mut self) {
        self.dicts.push(Vec::new());
        self.stack.push(Value::Dict(self.dicts.len() - 1));
    }

    fn top_dict(&mut self) -> Result<&mut Vec<(Value<'a>, Value<'a>)>, String> {
        match self.stack.last() {
            Some(Value::Dict(dict)) => Ok(&mut self.dicts[*dict]),
            _ => Err("only dictionaries may be filled".into()),
        }
    }

    /// Loads a reference to data outside the pickle: `("storage", class, name, device, numbers)`.
    fn persistent(&mut self) -> Result<(), String> {
        let [id] = self.popped()?;
        let parts = self.parts(id);
        let [Value::Text("storage"), Value::Global("torch", class), Value::Text(name), _, Value::Int(numbers)] = parts
        else {
            return Err("only storages of PyTorch may be outside the pickle".into());
        };
        let numbers = usize::try_from(*numbers).map_err(|_| "the size of a storage is negative")?;
        self.storages.push(Storage { class, name, numbers });
        self.stack.push(Value::Storage(self.storages.len() - 1));
        Ok(())
    }

    fn parts(&self, value: Value<'a>) -> &[Value<'a>] {
        match value {
            Value::Tuple(tuple) => &self.tuples[tuple],
            _ => &[],
        }
    }

    /// Evaluates a call, if it is one that builds dictionaries or tensors.
    fn call(&mut self) -> Result<(), String> {
        let [function, arguments] = self.popped()?;
        let Value::Global(module, name) = function else { return Err("something that is no class is called".into()) };
        match (module, name) {
            ORDERED_DICT if self.parts(arguments).is_empty() => self.dict(),
            REBUILD_PARAMETER => match self.parts(arguments) {
                [tensor @ Value::Tensor(_), ..] => self.stack.push(*tensor),
                _ => return Err("a parameter must be a tensor".into()),
            },
            REBUILD_TENSOR => {
                let tensor = self.tensor(arguments).ok_or_else(|| {
                    format!("a tensor must have a storage, an offset, a shape and strides, of {MOST_DIMENSIONS} dimensions at most")
                })?;
                self.tensors.push(tensor);
                self.stack.push(Value::Tensor(self.tensors.len() - 1));
            }
            _ => return Err(format!("{} is called, and pickles are not run", shown(&format!("{module}.{name}")))),
        }
        Ok(())
    }

    fn tensor(&self, arguments: Value<'a>) -> Option<Tensor<'a>> {
        let [Value::Storage(storage), Value::Int(offset), shape, strides, ..] = *self.parts(arguments) else {
            return None;
        };
        let sizes = |value: Value<'a>| -> Option<Vec<usize>> {
            let Value::Tuple(tuple) = value else { return None };
            let size = |value: &Value<'a>| match value {
                Value::Int(size) => usize::try_from(*size).ok(),
                _ => None,
            };
            Some(&self.tuples[tuple]).filter(|sizes| sizes.len() <= MOST_DIMENSIONS)?.iter().map(size).collect()
        };
        let Storage { class, name, numbers } = self.storages[storage];
        let offset = usize::try_from(offset).ok()?;
        Some(Tensor { class, storage: name, numbers, offset, shape: sizes(shape)?, strides: sizes(strides)? })
    }
}
