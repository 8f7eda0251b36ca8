//! Exports traces to a collector by OTLP over HTTP. A separate thread sends them in batches, so that no request waits;
//! while the collector is down, the log has an occasional warning.

use std::env;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use opentelemetry::{KeyValue, global};
use opentelemetry_otlp::{Protocol, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tracing::{debug, warn};

/// Time limit for sending one batch, and for sending the rest at shutdown.
const PATIENCE: Duration = Duration::from_secs(5);

/// Minimum time between two warnings about lost spans.
const BETWEEN_WARNINGS: Duration = Duration::from_mins(1);

/// Path of the traces endpoint below a collector's address.
const PATH: &str = "v1/traces";

/// The exporter; `None` without a collector.
pub(crate) struct Telemetry(Option<SdkTracerProvider>);

impl Telemetry {
    /// Starts exporting to the collector at `flag`, or to the one that OpenTelemetry's own variables name, on the
    /// caller's runtime.
    pub(crate) fn start(flag: Option<&str>) -> Result<Self> {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let Some(endpoint) = endpoint(flag, variable)? else { return Ok(Self(None)) };
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&endpoint)
            .with_timeout(PATIENCE)
            .build()
            .with_context(|| format!("cannot send traces to {endpoint}"))?;
        let exporter = OnRuntime { exporter: Arc::new(exporter), runtime: Handle::current(), lost: Mutex::default() };
        let provider =
            SdkTracerProvider::builder().with_resource(resource(variable)).with_batch_exporter(exporter).build();
        global::set_tracer_provider(provider.clone());
        global::set_text_map_propagator(TraceContextPropagator::new());
        debug!("sending traces to {endpoint}");
        Ok(Self(Some(provider)))
    }

    /// Sends the remaining spans, within [`PATIENCE`].
    pub(crate) async fn end(self) {
        let Some(provider) = self.0 else { return };
        let ending = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(PATIENCE));
        if let Ok(Err(error)) = ending.await {
            warn!("the last traces were not sent: {error}");
        }
    }
}

/// Returns the URL for traces, from the flag or else from the variables. `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` holds the
/// whole URL; the others hold the collector's.
fn endpoint(flag: Option<&str>, variable: impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
    let says = |name: &str, word: &str| variable(name).is_some_and(|value| value.eq_ignore_ascii_case(word));
    let below = |base: &str| format!("{}/{PATH}", base.trim_end_matches('/'));
    let (name, endpoint) = if let Some(flag) = flag.filter(|flag| !flag.is_empty()) {
        let whole = flag.trim_end_matches('/').ends_with(PATH);
        ("--otlp-endpoint", if whole { flag.to_owned() } else { below(flag) })
    } else if says("OTEL_SDK_DISABLED", "true") || says("OTEL_TRACES_EXPORTER", "none") {
        return Ok(None);
    } else if let Some(whole) = variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") {
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", whole)
    } else if let Some(base) = variable("OTEL_EXPORTER_OTLP_ENDPOINT") {
        ("OTEL_EXPORTER_OTLP_ENDPOINT", below(&base))
    } else {
        return Ok(None);
    };
    ensure!(
        endpoint.starts_with("http://"),
        "{name} must be an http:// address, got {endpoint:?}: traces are sent without TLS, to a collector next to the \
         server"
    );
    for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        let protocol = variable(name).unwrap_or_else(|| "http/protobuf".into());
        ensure!(protocol == "http/protobuf", "{name} must be http/protobuf, got {protocol:?}");
    }
    Ok(Some(endpoint))
}

/// Returns the service's name and version, which OpenTelemetry's variables override.
fn resource(variable: impl Fn(&str) -> Option<String>) -> Resource {
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let named = variable("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|attributes| names_service(&attributes));
    let resource = Resource::builder().with_attribute(version);
    if variable("OTEL_SERVICE_NAME").is_some() || named {
        return resource.build();
    }
    resource.with_service_name("tidegate").build()
}

/// Returns whether resource attributes, as in `key=value,other=value`, have a name for the service.
fn names_service(attributes: &str) -> bool {
    let mut pairs = attributes.split(',').filter_map(|pair| pair.split_once('='));
    pairs.any(|(key, value)| key.trim() == "service.name" && !value.trim().is_empty())
}

/// Sends batches on the server's runtime, because the thread that makes the batches has none.
#[derive(Debug)]
struct OnRuntime<E> {
    exporter: Arc<E>,
    runtime: Handle,
    lost: Mutex<Lost>,
}

/// Counts the spans that could not be sent.
#[derive(Debug, Default)]
struct Lost {
    spans: usize,
    warned: Option<Instant>,
}

impl Lost {
    /// Adds `spans`, and returns how many to warn about, at most once per [`BETWEEN_WARNINGS`].
    fn add(&mut self, spans: usize) -> Option<usize> {
        self.spans += spans;
        if self.warned.is_some_and(|warned| warned.elapsed() < BETWEEN_WARNINGS) {
            return None;
        }
        self.warned = Some(Instant::now());
        Some(std::mem::take(&mut self.spans))
    }
}

impl<E: SpanExporter + 'static> SpanExporter for OnRuntime<E> {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let (exporter, spans) = (Arc::clone(&self.exporter), batch.len());
        let sending = self.runtime.spawn(async move { timeout(PATIENCE, exporter.export(batch)).await });
        let sent = match sending.await {
            Ok(Ok(sent)) => sent,
            Ok(Err(_)) => Err(OTelSdkError::Timeout(PATIENCE)),
            Err(error) => Err(OTelSdkError::InternalFailure(error.to_string())),
        };
        if let Err(error) = &sent
            && let Some(lost) = self.lost.lock().unwrap_or_else(PoisonError::into_inner).add(spans)
        {
            warn!("{lost} spans did not reach the collector: {error}");
        }
        sent
    }

    fn set_resource(&mut self, resource: &Resource) {
        // The SDK calls this before the first batch, so the exporter is not shared yet.
        if let Some(exporter) = Arc::get_mut(&mut self.exporter) {
            exporter.set_resource(resource);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(flag: Option<&str>, variables: &[(&str, &str)]) -> Result<Option<String>> {
        endpoint(flag, |name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_flag_comes_before_the_variables_and_the_one_for_traces_before_the_other() {
        let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://b:4318/");
        let traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c/in");
        let found = |flag, variables: &[_]| with(flag, variables).unwrap();
        assert_eq!(found(Some("http://a:1"), &[base, traces]).as_deref(), Some("http://a:1/v1/traces"));
        assert_eq!(found(Some("http://a/v1/traces"), &[]).as_deref(), Some("http://a/v1/traces"));
        assert_eq!(found(None, &[base, traces]).as_deref(), Some("http://c/in"));
        assert_eq!(found(None, &[base]).as_deref(), Some("http://b:4318/v1/traces"));
        assert_eq!(found(None, &[base, ("OTEL_SDK_DISABLED", "true")]), None);
        assert_eq!(found(None, &[base, ("OTEL_TRACES_EXPORTER", "none")]), None);
        assert_eq!(found(Some(""), &[]), None);
    }

    #[test]
    fn what_cannot_be_done_is_refused_at_the_start() {
        let tls = with(Some("https://collector:4318"), &[]).unwrap_err().to_string();
        assert!(tls.contains("--otlp-endpoint") && tls.contains("without TLS"), "{tls}");
        let grpc = ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc");
        let protocol = with(Some("http://a"), &[grpc]).unwrap_err().to_string();
        assert!(protocol.contains("http/protobuf"), "{protocol}");
    }

    #[test]
    fn only_a_whole_key_names_the_service() {
        for attributes in ["service.name=x", "a=b, service.name = x ,c=d"] {
            assert!(names_service(attributes), "{attributes:?}");
        }
        for attributes in ["", "my.service.name=x", "a=service.name=x", "service.name.x=y", "service.name=,a=b"] {
            assert!(!names_service(attributes), "{attributes:?}");
        }
    }

    #[test]
    fn lost_spans_are_added_up_between_warnings() {
        let mut lost = Lost::default();
        assert_eq!(lost.add(3), Some(3));
        assert_eq!((lost.add(4), lost.add(5)), (None, None));
        lost.warned = Instant::now().checked_sub(BETWEEN_WARNINGS);
        assert_eq!(lost.add(1), Some(10));
    }
}
