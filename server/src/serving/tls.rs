//! The server's TLS certificate, which can be replaced while the server runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum_server::tls_rustls::RustlsConfig;
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};

/// Why a certificate cannot be used.
#[allow(missing_docs, reason = "the messages explain the fields")]
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or does not contain what it should.
    #[error("{what} {}: {error}", path.display())]
    File { what: &'static str, path: PathBuf, error: pem::Error },
    /// The certificate and the key do not match, or are of an unsupported kind.
    #[error("the certificate cannot be used with this key: {0}")]
    Pair(#[from] rustls::Error),
}

/// A certificate chain and its private key, from PEM files.
#[derive(Clone, Debug)]
pub struct Tls {
    cert: PathBuf,
    key: PathBuf,
    config: RustlsConfig,
}

impl Tls {
    /// Reads both files.
    ///
    /// # Errors
    /// A file cannot be read, or the certificate and the key do not match.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let config = RustlsConfig::from_config(Arc::new(read(cert, key)?));
        Ok(Self { cert: cert.to_owned(), key: key.to_owned(), config })
    }

    /// Reads both files again. New connections use the result.
    ///
    /// # Errors
    /// As for [`Self::load`]; the old certificate then stays in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.config.reload_from_config(Arc::new(read(&self.cert, &self.key)?));
        Ok(())
    }

    pub(super) fn config(&self) -> RustlsConfig {
        self.config.clone()
    }
}

fn read(cert: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let failed = |what, path: &Path| {
        let path = path.to_owned();
        move |error| TlsError::File { what, path, error }
    };
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .and_then(|chain| if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) })
        .map_err(failed("certificate", cert))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(failed("private key", key))?;
    // Named explicitly, because there is no default if a dependency adds another provider.
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
