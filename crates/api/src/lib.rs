//! The daemon's front doors. Each protocol has a folder; `lambda` is AWS Lambda's API over HTTP.
//! `function_url` serves the URLs of functions. `sts` is the one operation of AWS's Security Token
//! Service that clients need.
//!
//! - [`serve()`] runs the daemon: it opens [`firn_control::Control`] and listens;
//! - [`Credentials`] are the keys with which clients sign their requests;
//! - [`StatusClient`] reads the status of a daemon.

#[cfg(test)]
mod attachments_tests;
#[cfg(test)]
mod attack_tests;
mod credentials;
mod function_url;
mod http_client;
mod lambda;
#[cfg(test)]
mod layers_tests;
mod monitoring;
mod otlp;
#[cfg(test)]
mod provisioned_tests;
mod serve;
mod server;
mod sigv4;
mod status_client;
mod streamed;
mod sts;
#[cfg(test)]
mod tenants_tests;
#[cfg(test)]
mod terraform_tests;
#[cfg(test)]
mod tests;
mod url_stream;

pub use credentials::{Credentials, CredentialsError};
pub use otlp::OtlpError;
pub use serve::{ServeError, ServeOptions, serve};
pub use server::{Limits, Listen};
pub use status_client::{StatusClient, StatusClientError};
