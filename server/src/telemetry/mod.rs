//! Request traces, sent to a collector; only in programs built with the feature `otlp`.

#[cfg(feature = "otlp")]
mod otlp;
#[cfg(feature = "otlp")]
pub(crate) use otlp::Telemetry;

/// Replaces the exporter in a program built without it.
#[cfg(not(feature = "otlp"))]
pub(crate) struct Telemetry;

#[cfg(not(feature = "otlp"))]
impl Telemetry {
    /// Refuses to start if a collector is named.
    pub(crate) fn start(collector: Option<&str>) -> anyhow::Result<Self> {
        anyhow::ensure!(
            collector.is_none_or(str::is_empty),
            "--otlp-endpoint is not supported by this program: it was built without the feature `otlp` (cargo build \
             --release --features otlp)"
        );
        Ok(Self)
    }

    #[allow(clippy::unused_async, reason = "the exporter's form")]
    pub(crate) async fn end(self) {}
}
