//! Asking a daemon what it is doing.

use std::error::Error;
use std::time::SystemTime;

use axum::body::Bytes;
use axum::http::uri::InvalidUri;
use axum::http::{Request, StatusCode, Uri};
use tokio::runtime::{Builder, Runtime};

use crate::api::{Credentials, STATUS_PATH};
use crate::http_client::HttpClient;
use crate::instances::DaemonStatus;

/// Asks one daemon, time and again.
#[derive(Debug)]
pub struct StatusClient {
    runtime: Runtime,
    client: HttpClient,
    endpoint: String,
    uri: Uri,
    credentials: Option<Credentials>,
}

/// Why a daemon did not say what it is doing.
#[derive(Debug, thiserror::Error)]
pub enum StatusClientError {
    /// The endpoint is none.
    #[error("{endpoint} is no endpoint of a daemon: it has the form http://127.0.0.1:9700")]
    Endpoint {
        /// As it was named.
        endpoint: String,
        /// Why.
        source: InvalidUri,
    },
    /// The system refuses what a client needs.
    #[error("preparing to ask the daemon")]
    System(#[source] std::io::Error),
    /// It does not answer.
    #[error("no daemon answers at {endpoint}: start one with `firn serve`, or name its endpoint")]
    Exchange {
        /// The daemon.
        endpoint: String,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
    /// It wants signed requests.
    #[error(
        "the daemon at {endpoint} refused the request ({status}): name its keys with --credentials"
    )]
    Refused {
        /// The daemon.
        endpoint: String,
        /// What it answered.
        status: StatusCode,
    },
    /// It answers something else.
    #[error("what answers at {endpoint} is no daemon of this version of firn")]
    Answer {
        /// The daemon.
        endpoint: String,
        /// Why.
        source: serde_json::Error,
    },
}

impl StatusClient {
    /// A client of the daemon at `endpoint`, a URL; its requests are signed with the first of `credentials`.
    ///
    /// # Errors
    /// See [`StatusClientError`].
    pub fn new(
        endpoint: &str,
        credentials: Option<Credentials>,
    ) -> Result<Self, StatusClientError> {
        let endpoint = endpoint.trim_end_matches('/').to_owned();
        let uri = format!("{endpoint}{STATUS_PATH}")
            .parse()
            .map_err(|source| StatusClientError::Endpoint { endpoint: endpoint.clone(), source })?;
        let runtime = Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(StatusClientError::System)?;
        Ok(Self { runtime, client: HttpClient::new(), endpoint, uri, credentials })
    }

    /// Asks.
    ///
    /// # Errors
    /// See [`StatusClientError`].
    pub fn status(&self) -> Result<DaemonStatus, StatusClientError> {
        let endpoint = self.endpoint.clone();
        let mut request = Request::new(Bytes::new());
        *request.uri_mut() = self.uri.clone();
        if let Some(credentials) = &self.credentials {
            credentials.sign(&mut request, SystemTime::now());
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
