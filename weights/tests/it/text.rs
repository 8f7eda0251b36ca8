//! Documents and tokens: joined pieces equal the documents of a plain split, and tokenize like them.

use std::io::{Cursor, Read};

use proptest::prelude::*;
use tidegate_weights::text::{Documents, END_OF_TEXT, PIECE, Piece, TextError, TokenStream, load_tokenizer};

use crate::common::fixture;

fn pieces(text: &[u8], piece: usize) -> Result<Vec<Piece>, TextError> {
    Documents::new(Cursor::new(text), piece).collect()
}

/// Returns the documents, joined from their pieces.
fn joined(text: &str, piece: usize) -> Vec<String> {
    let mut documents: Vec<String> = Vec::new();
    for piece in pieces(text.as_bytes(), piece).unwrap() {
        assert!(!piece.text.is_empty());
        if piece.first {
            documents.push(piece.text);
        } else {
            documents.last_mut().unwrap().push_str(&piece.text);
        }
    }
    documents
}

/// Splits a text into documents as the trainer's `documents` does.
fn plain(text: &str) -> Vec<String> {
    let text = text.replace("\r\n", "\n").replace('\r', "\n");
    text.split(END_OF_TEXT).map(|d| d.trim_matches('\n')).filter(|d| !d.is_empty()).map(String::from).collect()
}

#[test]
fn documents_lose_marks_and_empty_ones() {
    let text = "<|endoftext|>\n\none\r\ntwo\n<|endoftext|>\n<|endoftext|> three<|endoftext|>";
    assert_eq!(joined(text, PIECE), ["one\ntwo", " three"]);
    assert_eq!(joined("no mark at all\n", PIECE), ["no mark at all"]);
    assert_eq!(joined("", PIECE), [""; 0]);
    assert_eq!(joined("\n<|endoftext|>\n", PIECE), [""; 0]);
}

#[test]
fn half_a_mark_is_text() {
    let text = "a <|endof text|> b <|endoftext| c<|endoftext|>d <|endoft";
    assert_eq!(joined(text, 64), plain(text));
}

#[test]
fn a_line_end_or_a_character_may_span_two_reads() {
    for shift in 60..70 {
        let text = format!("{}\r\né雪🙂 end", "x".repeat(shift));
        assert_eq!(joined(&text, 64), plain(&text), "shift {shift}");
    }
}

#[test]
fn the_error_gives_the_offset_of_an_invalid_byte() {
    let mut text = "fine ".repeat(100).into_bytes();
    text[321] = 0xff;
    let error = pieces(&text, 64).unwrap_err().to_string();
    assert_eq!(error, "text: not UTF-8 at byte 321");
    let cut = "é".as_bytes()[..1].to_vec();
    assert_eq!(pieces(&cut, 64).unwrap_err().to_string(), "text: not UTF-8 at byte 0");
}

#[test]
fn pieces_stay_small_whatever_the_text() {
    let words = "word ".repeat(20_000);
    let no_blank = "x".repeat(100_000);
    for text in [words.as_str(), no_blank.as_str()] {
        let longest = pieces(text.as_bytes(), 256).unwrap().iter().map(|p| p.text.len()).max().unwrap();
        assert!(longest <= 18 * 256, "{longest}");
        assert_eq!(joined(text, 256), plain(text));
    }
}

/// An endless document without a mark; counts the bytes read.
struct Endless(u64);

impl Read for Endless {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        buffer.fill_with(|| {
            self.0 += 1;
            if self.0.is_multiple_of(7) { b' ' } else { b'a' }
        });
        Ok(buffer.len())
    }
}

#[test]
fn reading_does_not_run_ahead_of_the_pieces() {
    let mut documents = Documents::new(Endless(0), 1024);
    let mut taken = 0;
    for _ in 0..500 {
        taken += documents.next().unwrap().unwrap().text.len() as u64;
        assert!(documents.bytes_read() - taken <= 4 * 1024);
    }
}

#[test]
fn every_document_is_led_by_the_mark_and_the_last_closed() {
    let tokenizer = load_tokenizer(&fixture()).unwrap();
    let documents = Documents::new(Cursor::new("one<|endoftext|>two"), PIECE);
    let tokens: Vec<_> = TokenStream::new(documents, &tokenizer).unwrap().map(Result::unwrap).collect();
    assert_eq!(tokens.len(), 3);
    assert!(tokens.iter().all(|t| t.first && t.ids[0] == 0));
    assert_eq!((tokens[0].bytes, tokens[1].bytes, tokens[2].bytes), (3, 3, 0));
    assert_eq!(tokens[2].ids, [0]);
    let empty = TokenStream::new(Documents::new(Cursor::new("\n\n"), PIECE), &tokenizer).unwrap().next();
    assert!(matches!(empty, Some(Err(TextError::Empty))));
}

/// Words, runs of blanks, contractions, digits, complete and incomplete marks, other scripts.
fn any_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        6 => "[a-z]{1,9}".prop_map(String::from),
        2 => "[0-9]{1,5}".prop_map(String::from),
        6 => Just(" ".to_string()),
        2 => "[ \n\t]{1,4}".prop_map(String::from),
        1 => Just("\r\n".to_string()),
        2 => "[.,;!?'\"<|>-]{1,3}".prop_map(String::from),
        1 => prop_oneof![Just("'s"), Just("'re"), Just("雪"), Just("é"), Just("🙂"), Just("\u{301}"), Just("\u{a0}")]
            .prop_map(String::from),
        1 => prop_oneof![Just(END_OF_TEXT), Just("<|endof")].prop_map(String::from),
    ];
    prop::collection::vec(part, 0..200).prop_map(|parts| parts.concat())
}

proptest! {
    #[test]
    fn pieces_tokenize_as_whole_documents_do(text in any_text(), piece in 64_usize..200) {
        let documents = plain(&text);
        prop_assert_eq!(&joined(&text, piece), &documents);
        let tokenizer = load_tokenizer(&fixture()).unwrap();
        let stream = TokenStream::new(Documents::new(Cursor::new(&text), piece), &tokenizer).unwrap();
        let got: Result<Vec<_>, _> = stream.collect();
        if documents.is_empty() {
            prop_assert!(matches!(got, Err(TextError::Empty)));
            return Ok(());
        }
        let got = got.unwrap();
        let mut want = Vec::new();
        for document in &documents {
            // The post-processor adds the mark.
            want.extend_from_slice(tokenizer.encode(document.as_str(), true).unwrap().get_ids());
        }
        want.push(0);
        prop_assert_eq!(got.iter().flat_map(|t| t.ids.clone()).collect::<Vec<_>>(), want);
        prop_assert_eq!(got.iter().filter(|t| t.first).count(), documents.len() + 1);
        let bytes: usize = documents.iter().map(String::len).sum();
        prop_assert_eq!(got.iter().map(|t| t.bytes).sum::<u64>(), bytes as u64);
    }
}
