//! Reads the status of a daemon.

use std::error::Error;
use std::time::SystemTime;

use axum::body::Bytes;
use axum::http::uri::InvalidUri;
use axum::http::{Request, StatusCode, Uri};
use firn_control::DaemonStatus;
use tokio::runtime::{Builder, Runtime};

use crate::credentials::Credentials;
use crate::http_client::HttpClient;
use crate::monitoring::STATUS_PATH;

/// A client of one daemon.
#[derive(Debug)]
pub struct StatusClient {
    runtime: Runtime,
    client: HttpClient,
    endpoint: String,
    uri: Uri,
    credentials: Option<Credentials>,
    region: String,
}

/// The status of a daemon cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StatusClientError {
    /// The endpoint is not a URL.
    #[error("{endpoint} is not a daemon endpoint; expected http://HOST:PORT")]
    Endpoint {
        /// The endpoint.
        endpoint: String,
        /// The cause.
        source: InvalidUri,
    },
    /// A system call of the client failed.
    #[error("cannot start the HTTP client")]
    System(#[source] std::io::Error),
    /// The daemon does not answer.
    #[error("no daemon answers at {endpoint}: start one with `firn serve`, or pass its endpoint")]
    Exchange {
        /// The daemon.
        endpoint: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The daemon requires signed requests.
    #[error(
        "the daemon at {endpoint} refused the request ({status}): pass its keys with --credentials"
    )]
    Refused {
        /// The daemon.
        endpoint: String,
        /// The answer's status code.
        status: StatusCode,
    },
    /// The answer is not a status document.
    #[error("the server at {endpoint} is not a firn daemon of this version")]
    Answer {
        /// The daemon.
        endpoint: String,
        /// The cause.
        source: serde_json::Error,
    },
}

impl StatusClient {
    /// A client of the daemon at `endpoint`, a URL. It signs its requests with the first of
    /// `credentials` for
    /// `region`, the daemon's.
    ///
    /// # Errors
    /// See [`StatusClientError`].
    pub fn new(
        endpoint: &str,
        credentials: Option<Credentials>,
        region: &str,
    ) -> Result<Self, StatusClientError> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let uri = format!("{endpoint}{STATUS_PATH}")
            .parse()
            .map_err(|source| StatusClientError::Endpoint { endpoint: endpoint.clone(), source })?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(StatusClientError::System)?;
        Ok(Self {
            runtime,
            client: HttpClient::new(),
            endpoint,
            uri,
            credentials,
            region: region.to_owned(),
        })
    }

    /// Reads the current status.
    ///
    /// # Errors
    /// See [`StatusClientError`].
    pub fn status(&self) -> Result<DaemonStatus, StatusClientError> {
        let endpoint = self.endpoint.clone();
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = self.uri.clone();
        if let Some(credentials) = &self.credentials {
            credentials.sign(&mut request, &self.region, SystemTime::now());
        }
        let answered = self.runtime.block_on(self.client.send(request));
        let answer = answered
            .map_err(|source| StatusClientError::Exchange { endpoint: endpoint.clone(), source })?;
        if !answer.status().is_success() {
            return Err(StatusClientError::Refused { endpoint, status: answer.status() });
        }
        serde_json::from_slice(answer.body())
            .map_err(|source| StatusClientError::Answer { endpoint, source })
    }
}
