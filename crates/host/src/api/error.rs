//! Errors in AWS Lambda's form: a status code, `x-amzn-ErrorType`, and a JSON body.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use firn_agent::protocol::MAX_EVENT_BYTES;
use serde_json::json;

use super::REPORT;
use crate::functions::{CodeError, NameError};
use crate::instances::{AcquireError, ImageError, InvokeFailure, LoadFailure, StartError};
use crate::store::StoreError;

/// An error of the API.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    reason: Option<&'static str>,
    /// What the request cost, in JSON, where it came so far as to be run.
    report: Option<String>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), reason: None, report: None }
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "InvalidParameterValueException", message)
    }

    pub(crate) fn validation(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "ValidationException", message)
    }

    pub(crate) fn request_content(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "InvalidRequestContentException", message)
    }

    pub(crate) fn too_large(limit: usize, operation: &str) -> Self {
        let message =
            format!("Request must be smaller than {limit} bytes for the {operation} operation");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLargeException", message)
    }

    /// Invoke has an error of its own for that.
    pub(crate) fn event_too_large() -> Self {
        let error = Self::too_large(MAX_EVENT_BYTES, "InvokeFunction");
        Self { kind: "RequestTooLargeException", ..error }
    }

    pub(crate) fn not_found(what: &str, arn: impl std::fmt::Display) -> Self {
        let message = format!("{what} not found: {arn}");
        Self::new(StatusCode::NOT_FOUND, "ResourceNotFoundException", message)
    }

    pub(crate) fn no_such_operation() -> Self {
        let message = "this daemon has no such operation";
        Self::new(StatusCode::NOT_FOUND, "UnknownOperationException", message)
    }

    pub(crate) fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "ResourceConflictException", message)
    }

    pub(crate) fn precondition() -> Self {
        let message = "The RevisionId provided does not match the latest RevisionId.";
        Self::new(StatusCode::PRECONDITION_FAILED, "PreconditionFailedException", message)
    }

    pub(crate) fn not_ready(function: &str) -> Self {
        let message = format!(
            "Lambda is initializing your function. It will be ready to invoke once {function} becomes ACTIVE."
        );
        Self::new(StatusCode::CONFLICT, "SnapStartNotReadyException", message)
    }

    pub(crate) fn snap_start(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "SnapStartException", message)
    }

    pub(crate) fn forbidden(kind: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, kind, message)
    }

    fn throttled(reason: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequestsException", message);
        Self { reason: Some(reason), ..error }
    }

    /// What went wrong in the daemon goes to its log; the client learns that it did.
    pub(crate) fn service(error: &(dyn std::error::Error + 'static), message: &str) -> Self {
        tracing::error!(error, "{message}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "ServiceException", message)
    }

    pub(crate) fn too_many_events() -> Self {
        Self::throttled("ConcurrentInvocationLimitExceeded", "too many events wait")
    }

    /// Adds what the request cost.
    pub(crate) fn with_report(self, report: String) -> Self {
        Self { report: Some(report), ..self }
    }

    /// Whether the same request may do better later: there was no room for it, or the daemon failed.
    pub(crate) fn is_passing(&self) -> bool {
        self.is_throttling() || self.status.is_server_error()
    }

    /// Whether the request was turned away for want of room.
    pub(crate) fn is_throttling(&self) -> bool {
        self.status == StatusCode::TOO_MANY_REQUESTS
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let fault = if self.status.is_server_error() { "Service" } else { "User" };
        let mut body = json!({ "Type": fault, "Message": self.message, "message": self.message });
        if let Some(reason) = self.reason {
            body["Reason"] = json!(reason);
        }
        let report = self.report.map(|report| [(REPORT, report)]);
        (self.status, [("x-amzn-ErrorType", self.kind)], report, Json(body)).into_response()
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        Self::service(&error, "the daemon's database failed")
    }
}

impl From<NameError> for ApiError {
    fn from(error: NameError) -> Self {
        match error {
            NameError::Mismatch => Self::invalid(error.to_string()),
            _ => Self::validation(error.to_string()),
        }
    }
}

impl From<CodeError> for ApiError {
    fn from(error: CodeError) -> Self {
        if error.is_ours() {
            Self::service(&error, "the code cannot be stored")
        } else {
            Self::invalid(error.to_string())
        }
    }
}

impl From<ImageError> for ApiError {
    fn from(error: ImageError) -> Self {
        Self::invalid(error.to_string())
    }
}

impl From<InvokeFailure> for ApiError {
    fn from(failure: InvokeFailure) -> Self {
        match failure {
            InvokeFailure::Acquire(error) => error.into(),
            InvokeFailure::Restore(error) => Self::snap_start(error.to_string()),
            InvokeFailure::Start(LoadFailure::Start(StartError::Image(error))) => {
                let status = StatusCode::BAD_GATEWAY;
                Self::new(status, "InvalidRuntimeException", error.to_string())
            }
            InvokeFailure::Start(_)
            | InvokeFailure::Lost(_)
            | InvokeFailure::Dead(_)
            | InvokeFailure::Task(_) => Self::service(&failure, "the request was not served"),
        }
    }
}

impl From<AcquireError> for ApiError {
    fn from(error: AcquireError) -> Self {
        let text = error.to_string();
        match error {
            AcquireError::Concurrency => {
                Self::throttled("ReservedFunctionConcurrentInvocationLimitExceeded", text)
            }
            AcquireError::QueueFull | AcquireError::Waited => {
                Self::throttled("ConcurrentInvocationLimitExceeded", text)
            }
            AcquireError::TooLarge => {
                Self::new(StatusCode::BAD_GATEWAY, "ResourceNotReadyException", text)
            }
            AcquireError::Closed => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceException", text)
            }
        }
    }
}
