//! The events of a streamed response.

use serde::Serialize;
use utoipa::ToSchema;

use super::items::{OutputItem, ReasoningPart, TextPart};
use super::object::Object;
use crate::api::run::encoder::{StreamEvent, to_json};

/// An event: its name, its number in the stream, and its contents.
#[derive(Serialize, ToSchema)]
#[schema(as = ResponseEvent)]
pub(in crate::api) struct Event<'a> {
    #[serde(rename = "type")]
    name: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    payload: Payload<'a>,
}

#[derive(Serialize, ToSchema)]
#[serde(untagged)]
#[schema(as = ResponsePayload)]
pub(super) enum Payload<'a> {
    Response {
        // `ResponseObject` is an alias of `Object`: utoipa takes a type called `Object` for any JSON object.
        #[schema(value_type = super::ResponseObject)]
        response: &'a Object,
    },
    Item {
        output_index: usize,
        item: &'a OutputItem,
    },
    Part {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        part: &'a TextPart,
    },
    Delta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
        #[schema(value_type = Vec<Value>, max_items = 0)]
        logprobs: [(); 0],
    },
    Text {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        #[schema(value_type = Vec<Value>, max_items = 0)]
        logprobs: [(); 0],
    },
    ReasoningPart {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        part: &'a ReasoningPart,
    },
    ReasoningDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
    },
    Reasoning {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
    },
    ArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
    },
    Arguments {
        item_id: &'a str,
        output_index: usize,
        name: &'a str,
        arguments: &'a str,
    },
    Error {
        #[schema(required)]
        code: Option<&'a str>,
        message: &'a str,
        #[schema(required)]
        param: Option<&'a str>,
    },
}

/// Collects the events of a stream, and numbers them.
pub(super) struct Events<'a> {
    /// The number of the next event.
    pub(super) next: &'a mut u64,
    pub(super) out: &'a mut Vec<StreamEvent>,
}

impl Events<'_> {
    pub(super) fn send(&mut self, name: &'static str, payload: Payload<'_>) {
        let event = Event { name, sequence_number: *self.next, payload };
        self.out.push(StreamEvent { name: Some(name), data: to_json(&event) });
        *self.next += 1;
    }
}
