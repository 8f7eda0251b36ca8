//! Traces by OTLP over HTTP to a collector, where one is named: in batches from a thread of their own, so that no
//! request waits for it, and a collector that is down costs a warning now and then.

use std::env;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use opentelemetry::{KeyValue, global};
use opentelemetry_otlp::{Protocol, WithExportConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::{OTelSdkError, OTelSdkResult};
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use tokio::runtime::Handle;
use tokio::time::timeout;
use tracing::{debug, warn};

/// Longest time that one batch may take, and all that is left at the end.
const PATIENCE: Duration = Duration::from_secs(5);

/// Least time between two warnings that spans are lost.
const BETWEEN_WARNINGS: Duration = Duration::from_mins(1);

/// Where OTLP over HTTP takes traces, below a collector's address.
const PATH: &str = "v1/traces";

/// The exporter; nothing where no collector is named.
pub(crate) struct Telemetry(Option<SdkTracerProvider>);

impl Telemetry {
    /// Starts to export to the collector at `flag`, or to the one that OpenTelemetry's own variables name. To be
    /// called within the runtime that it is to work on.
    pub(crate) fn start(flag: Option<&str>) -> Result<Self> {
        let variable = |name: &str| env::var(name).ok().filter(|value| !value.is_empty());
        let Some(endpoint) = endpoint(flag, variable)? else { return Ok(Self(None)) };
        let exporter = opentelemetry_otlp::SpanExporter::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(&endpoint)
            .with_timeout(PATIENCE)
            .build()
            .with_context(|| format!("no traces can be sent to {endpoint}"))?;
        let exporter =
            OnRuntime { exporter: Some(Arc::new(exporter)), runtime: Handle::current(), lost: Mutex::default() };
        let provider =
            SdkTracerProvider::builder().with_resource(resource(variable)).with_batch_exporter(exporter).build();
        global::set_tracer_provider(provider.clone());
        debug!("traces go to {endpoint}");
        Ok(Self(Some(provider)))
    }

    /// Sends what is left, for a few seconds at most.
    pub(crate) async fn end(self) {
        let Some(provider) = self.0 else { return };
        let ending = tokio::task::spawn_blocking(move || provider.shutdown_with_timeout(PATIENCE));
        if let Ok(Err(error)) = ending.await {
            warn!("the last traces were not sent: {error}");
        }
    }
}

/// Where traces go: the flag's collector, or the one of the variables, of which the one for traces names the whole
/// address.
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
        "{name} must be an http:// address, found {endpoint:?}: traces are sent without TLS, to a collector beside the \
         server that can send them on"
    );
    for name in ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"] {
        let protocol = variable(name).unwrap_or_else(|| "http/protobuf".into());
        ensure!(protocol == "http/protobuf", "{name} must be http/protobuf, found {protocol:?}");
    }
    Ok(Some(endpoint))
}

/// What names this server in traces; OpenTelemetry's variables have the last word.
fn resource(variable: impl Fn(&str) -> Option<String>) -> Resource {
    let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let named = variable("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|all| all.contains("service.name="));
    let resource = Resource::builder().with_attribute(version);
    if variable("OTEL_SERVICE_NAME").is_some() || named {
        return resource.build();
    }
    resource.with_service_name("tidegate").build()
}

/// An exporter whose connections live on the server's runtime: the thread that makes the batches has none.
#[derive(Debug)]
struct OnRuntime<E> {
    /// None while its resource is being set.
    exporter: Option<Arc<E>>,
    runtime: Handle,
    lost: Mutex<Lost>,
}

/// Spans that did not arrive.
#[derive(Debug, Default)]
struct Lost {
    spans: usize,
    warned: Option<Instant>,
}

impl Lost {
    /// Adds `spans`; how many to warn of, where it is time to.
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
        let Some(exporter) = self.exporter.clone() else { return Err(OTelSdkError::AlreadyShutdown) };
        let spans = batch.len();
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
        // It is set before the first batch, while nobody else has the exporter.
        if let Some(exporter) = self.exporter.as_mut().and_then(Arc::get_mut) {
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
    fn lost_spans_are_added_up_between_warnings() {
        let mut lost = Lost::default();
        assert_eq!(lost.add(3), Some(3));
        assert_eq!((lost.add(4), lost.add(5)), (None, None));
        lost.warned = Instant::now().checked_sub(BETWEEN_WARNINGS);
        assert_eq!(lost.add(1), Some(10));
    }
}
