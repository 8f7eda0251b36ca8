//! The labels of metrics. Every label has a bounded number of values.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};

/// The prefix of metrics that are specific to this server.
pub(super) const PREFIX: &str = "tidegate";

/// Labels of an HTTP response.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct HttpLabels {
    /// The pattern of the route, never the path; `other` if none matched.
    pub(crate) route: String,
    /// The method; `other` if HTTP does not define it.
    pub(crate) method: &'static str,
    pub(crate) status: u16,
}

/// Labels of an error response.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ErrorLabels {
    pub(crate) status: u16,
    /// The error's code, or its type if it has none.
    pub(crate) code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct ReasonLabel {
    pub(super) finished_reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CodeLabel {
    pub(super) code: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct CauseLabel {
    pub(super) cause: Cancelled,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(super) struct TierLabel {
    pub(super) tier: &'static str,
}

/// Why a text was canceled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Cancelled {
    /// The client disconnected.
    Disconnected,
    /// The client read nothing for too long.
    Stalled,
    /// The server shut down; another server can continue the stream.
    Released,
}

impl EncodeLabelValue for Cancelled {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        let word = match self {
            Self::Disconnected => "disconnected",
            Self::Stalled => "stalled",
            Self::Released => "released",
        };
        EncodeLabelValue::encode(&word, encoder)
    }
}
