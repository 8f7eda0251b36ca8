//! The server's certificate, which may be exchanged while it runs.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum_server::tls_rustls::RustlsConfig;
use rustls::ServerConfig;
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};

/// Why a certificate cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file is not there, or has nothing of the kind in it.
    #[error("{what} {}: {error}", path.display())]
    File {
        /// What should be in it.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// Why it is not.
        error: pem::Error,
    },
    /// The certificate and the key do not belong together, or are of an unknown kind.
    #[error("the certificate cannot be used with this key: {0}")]
    Pair(#[from] rustls::Error),
}

/// A certificate with its chain, and its private key, from files as PEM.
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
    /// One of them cannot be read, or they do not belong together.
    pub fn load(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let config = RustlsConfig::from_config(Arc::new(read(cert, key)?));
        Ok(Self { cert: cert.to_owned(), key: key.to_owned(), config })
    }

    /// Reads both files again, for connections from now on.
    ///
    /// # Errors
    /// As with [`Self::load`]; then all stays as it was.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.config.reload_from_config(Arc::new(read(&self.cert, &self.key)?));
        Ok(())
    }

    pub(super) fn config(&self) -> RustlsConfig {
        self.config.clone()
    }
}

fn read(cert: &Path, key: &Path) -> Result<ServerConfig, TlsError> {
    let wrong = |what, path: &Path| {
        let path = path.to_owned();
        move |error| TlsError::File { what, path, error }
    };
    let chain = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .and_then(|chain| if chain.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(chain) })
        .map_err(wrong("certificate", cert))?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(wrong("private key", key))?;
    // Named, since another one may be built in for other purposes, and then none is the default.
    let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_single_cert(chain, key)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}
