//! Errors in AWS Lambda's form (a status code, `x-amzn-ErrorType` and a JSON body), and the
//! translation of the service's errors into them.

use axum::Json;
use axum::http::{HeaderName, StatusCode};
use axum::response::{IntoResponse, Response};
use firn_agent::protocol::MAX_EVENT_BYTES;
use firn_control::{
    AcquireError, AliasError, AttachmentError, ChangeError, CodeError, ConfigurationError,
    DeleteError, EventRefused, Field, FindError, InvalidTag, InvokeFailure, LaunchError,
    LoadFailure, MAX_ENVIRONMENT, MAX_UNPACKED, NotFound, PrepareError, ProvisionedError,
    PublishError, QuotaError, RevisionMismatch, StoreError, TaskFailed,
};
use firn_run::EventError;
use serde_json::json;

use super::names::{ParseNameError, Scope};
use super::{Lambda, REPORT};
use crate::sigv4::SignatureError;

/// The header with an error's type.
pub(super) const ERROR_TYPE: HeaderName = HeaderName::from_static("x-amzn-errortype");

/// An error of the API.
#[derive(Debug)]
pub(crate) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    reason: Option<&'static str>,
    /// The report of a request that was run, in JSON.
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

    /// A value does not satisfy a rule, which is an infinitive.
    pub(crate) fn constraint(field: &str, value: &str, rule: &str) -> Self {
        Self::validation(format!(
            "1 validation error detected: Value '{value}' at '{field}' failed to satisfy constraint: Member must {rule}"
        ))
    }

    /// The body is not the expected JSON.
    pub(crate) fn not_json(error: &dyn std::fmt::Display) -> Self {
        Self::request_content(format!("Could not parse request body into json: {error}"))
    }

    pub(crate) fn request_content(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "InvalidRequestContentException", message)
    }

    pub(crate) fn too_large(limit: usize, operation: &str) -> Self {
        let message =
            format!("Request must be smaller than {limit} bytes for the {operation} operation");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "RequestEntityTooLargeException", message)
    }

    /// The request may come from a page in a browser, on behalf of another site.
    pub(crate) fn foreign(message: impl Into<String>) -> Self {
        Self::new(StatusCode::FORBIDDEN, "AccessDeniedException", message)
    }

    /// No permission allows a request to a function's URL, or there is no such URL.
    pub(crate) fn forbidden() -> Self {
        Self::foreign("Forbidden")
    }

    /// A request to a function's URL cannot be served.
    pub(crate) fn not_prepared(error: PrepareError, scope: &Scope) -> Self {
        match error {
            PrepareError::NotFound(_) => Self::forbidden(),
            error => error.translate(scope),
        }
    }

    pub(crate) fn content_type(kind: &str) -> Self {
        let message = format!("a body of the type {kind} is refused: send application/json");
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "UnsupportedMediaTypeException", message)
    }

    pub(crate) fn body_too_slow() -> Self {
        let message = "the request's body did not arrive in time";
        Self::new(StatusCode::REQUEST_TIMEOUT, "RequestTimeoutException", message)
    }

    /// The bodies of other requests leave no room.
    pub(crate) fn buffer_full() -> Self {
        let message = "the daemon holds too many bytes of other requests: try again";
        Self::throttled("CallerRateLimitExceeded", message)
    }

    /// A request with the same signature was accepted, and its answer is not known.
    pub(super) fn unanswered() -> Self {
        Self::conflict(
            "A request with this signature was accepted before and is not answered: look at its effect, then sign again",
        )
    }

    /// The answers of requests that take effect once leave no room.
    pub(super) fn too_many_changes() -> Self {
        let message = "too many signed changes in half an hour: try again later";
        Self::throttled("CallerRateLimitExceeded", message)
    }

    /// Invoke has its own error for a request that is too large.
    pub(crate) fn event_too_large() -> Self {
        let error = Self::too_large(MAX_EVENT_BYTES, "InvokeFunction");
        Self { kind: "RequestTooLargeException", ..error }
    }

    /// Something of a function does not exist.
    pub(super) fn missing(message: String) -> Self {
        Self::new(StatusCode::NOT_FOUND, "ResourceNotFoundException", message)
    }

    /// A version or alias has no provisioned concurrency.
    pub(super) fn not_provisioned() -> Self {
        let kind = "ProvisionedConcurrencyConfigNotFoundException";
        let message = "No Provisioned Concurrency Config found for this function";
        Self::new(StatusCode::NOT_FOUND, kind, message)
    }

    /// The version of a layer does not exist.
    pub(super) fn no_layer() -> Self {
        Self::missing("The resource you requested does not exist.".to_owned())
    }

    fn not_found(what: &str, arn: impl std::fmt::Display) -> Self {
        Self::missing(format!("{what} not found: {arn}"))
    }

    /// The operation is not supported, or there is none at this path.
    pub(crate) fn no_such_operation(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "UnknownOperationException", message)
    }

    /// The query protocol's error for an unknown operation.
    pub(crate) fn no_such_action(action: &str, version: &str) -> Self {
        let message = format!("Could not find operation {action} for version {version}");
        Self::new(StatusCode::BAD_REQUEST, "InvalidAction", message)
    }

    fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "ResourceConflictException", message)
    }

    fn not_ready(function: &impl std::fmt::Display) -> Self {
        let message = format!(
            "Lambda is initializing your function. It will be ready to invoke once {function} becomes ACTIVE."
        );
        Self::new(StatusCode::CONFLICT, "SnapStartNotReadyException", message)
    }

    fn snap_start(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "SnapStartException", message)
    }

    fn throttled(reason: &'static str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "TooManyRequestsException", message);
        Self { reason: Some(reason), ..error }
    }

    /// The daemon failed. Its log has the error, and the client gets `message`.
    pub(crate) fn service(error: &(dyn std::error::Error + 'static), message: &str) -> Self {
        tracing::error!(error, "{message}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "ServiceException", message)
    }

    /// Status, type and message, for another protocol.
    pub(crate) fn into_parts(self) -> (StatusCode, &'static str, String) {
        (self.status, self.kind, self.message)
    }

    /// Adds the report of the request, in JSON.
    pub(crate) fn with_report(self, report: String) -> Self {
        Self { report: Some(report), ..self }
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
        (self.status, [(ERROR_TYPE, self.kind)], report, Json(body)).into_response()
    }
}

/// An error of an operation, which becomes an error of the API.
pub(super) trait Translate {
    /// The error of the API. `scope` completes the ARNs in its text.
    fn translate(self, scope: &Scope) -> ApiError;
}

impl Lambda {
    /// Translates the error of an operation.
    pub(super) fn error<E: Translate>(&self) -> impl FnOnce(E) -> ApiError {
        |error| error.translate(&self.scope)
    }
}

impl Translate for NotFound {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::Function(target) => ApiError::not_found("Function", scope.arn_of(&target)),
            Self::Alias(target) => {
                ApiError::not_found("Cannot find alias arn", scope.arn_of(&target))
            }
        }
    }
}

impl Translate for FindError {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::NotFound(error) => error.translate(scope),
            Self::Store(error) => error.into(),
            Self::Task(error) => error.into(),
        }
    }
}

impl Translate for ChangeError {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::Exists(name) => ApiError::conflict(format!("Function already exist: {name}")),
            Self::LayerExists(name) => ApiError::conflict(format!("Layer already exist: {name}")),
            Self::NotFound(error) => error.translate(scope),
            Self::Tag(error) => error.into(),
            Self::Revision(error) => error.into(),
            Self::Configuration(error) => error.into(),
            Self::Code(error) => error.into(),
            Self::Quota(error) => error.into(),
            Self::Publish(error) => error.translate(scope),
            Self::Store(error) => error.into(),
            Self::Task(error) => error.into(),
        }
    }
}

impl Translate for PublishError {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::NotFound(error) => error.translate(scope),
            Self::Revision(error) => error.into(),
            Self::Code { expected, actual } => ApiError::invalid(format!(
                "CodeSHA256 ({expected}) is different from current CodeSHA256 in $LATEST ({actual}). Please try again \
                 with the CodeSHA256 in $LATEST.",
            )),
            Self::NoRestoreHook => ApiError::invalid(self.to_string()),
            Self::Quota(error) => error.into(),
            Self::Configuration(error) => error.into(),
            Self::Store(error) => error.into(),
            Self::Task(error) => error.into(),
        }
    }
}

impl Translate for DeleteError {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::NotFound(error) => error.translate(scope),
            Self::Latest => ApiError::invalid(
                "$LATEST version cannot be deleted without deleting the function.",
            ),
            Self::Alias => ApiError::invalid("DeleteAlias deletes an alias"),
            Self::Aliased { version, alias } => {
                ApiError::conflict(format!("Version {version} is used by the alias {alias}"))
            }
            Self::Store(error) => error.into(),
            Self::Task(error) => error.into(),
        }
    }
}

impl Translate for AliasError {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::NotFound(error) => error.translate(scope),
            Self::Name(name) => ApiError::validation(format!(
                "Value '{name}' at 'name' failed to satisfy constraint: letters, digits, hyphens and underscores, and \
                 not a number"
            )),
            Self::Exists(target) => {
                ApiError::conflict(format!("Alias already exists: {}", scope.arn_of(&target)))
            }
            Self::Weights(_) => ApiError::invalid(format!("RoutingConfig: {self}")),
            Self::Provisioned(error) => error.into(),
            Self::NoVersion => ApiError::validation("FunctionVersion must not be null"),
            Self::Revision(error) => error.into(),
            Self::Store(error) => error.into(),
            Self::Task(error) => error.into(),
        }
    }
}

impl Translate for AttachmentError {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::NotFound(error) => error.translate(scope),
            Self::NoLayer => ApiError::no_layer(),
            Self::None(target) => ApiError::not_found("Settings", scope.arn_of(&target)),
            Self::Tag(error) => error.into(),
            Self::UrlExists(target) => ApiError::conflict(format!(
                "Failed to create function url config for [functionArn = {}]. Error message:  FunctionUrlConfig \
                 exists for this Lambda function",
                scope.arn_of(&target)
            )),
            Self::StatementExists(id) => ApiError::conflict(format!(
                "The statement id ({id}) provided already exists. Please provide a new statement id, or remove the \
                 existing statement."
            )),
            Self::NoStatement(id) => {
                ApiError::missing(format!("Statement {id} is not found in resource policy."))
            }
            Self::TooLong => {
                let kind = "PolicyLengthExceededException";
                ApiError::new(StatusCode::BAD_REQUEST, kind, self.to_string())
            }
            Self::Latest | Self::Qualified => ApiError::invalid(self.to_string()),
            Self::Provisioned(error) => error.into(),
            Self::Revision(error) => error.into(),
            Self::Store(error) => error.into(),
            Self::Task(error) => error.into(),
        }
    }
}

impl From<ProvisionedError> for ApiError {
    fn from(error: ProvisionedError) -> Self {
        match error {
            ProvisionedError::Twice { .. } => Self::conflict(error.to_string()),
            ProvisionedError::Quota(error) => error.into(),
            ProvisionedError::Unpublished
            | ProvisionedError::Weights(_)
            | ProvisionedError::SnapStart(_)
            | ProvisionedError::OverReserved { .. }
            | ProvisionedError::OverMonitors { .. } => Self::invalid(error.to_string()),
        }
    }
}

impl From<InvalidTag> for ApiError {
    fn from(error: InvalidTag) -> Self {
        Self::invalid(error.to_string())
    }
}

impl Translate for PrepareError {
    fn translate(self, scope: &Scope) -> ApiError {
        match self {
            Self::NotFound(error) => error.translate(scope),
            Self::Pending(target) => ApiError::not_ready(&scope.arn_of(&target)),
            Self::Failed { .. } => ApiError::snap_start(self.to_string()),
            Self::Utf8(error) => ApiError::not_json(&error),
            Self::Event(EventError::TooLong { .. }) => ApiError::event_too_large(),
            Self::Event(EventError::NotJson(error)) => ApiError::not_json(&error),
            Self::Store(error) => error.into(),
            Self::Task(error) => error.into(),
        }
    }
}

impl From<StoreError> for ApiError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Full(_) => {
                let kind = "CodeStorageExceededException";
                Self::new(StatusCode::BAD_REQUEST, kind, error.to_string())
            }
            error => Self::service(&error, "the daemon's database failed"),
        }
    }
}

impl From<QuotaError> for ApiError {
    fn from(error: QuotaError) -> Self {
        let (status, kind) = match error {
            QuotaError::Code { .. } => (StatusCode::BAD_REQUEST, "CodeStorageExceededException"),
            QuotaError::Functions { .. }
            | QuotaError::Provisioned { .. }
            | QuotaError::Versions { .. }
            | QuotaError::Snapshots { .. } => {
                (StatusCode::PAYMENT_REQUIRED, "ServiceQuotaExceededException")
            }
        };
        Self::new(status, kind, error.to_string())
    }
}

impl From<TaskFailed> for ApiError {
    fn from(error: TaskFailed) -> Self {
        Self::service(&error, "a task of the daemon failed")
    }
}

impl From<RevisionMismatch> for ApiError {
    fn from(_: RevisionMismatch) -> Self {
        let message = "The RevisionId provided does not match the latest RevisionId.";
        Self::new(StatusCode::PRECONDITION_FAILED, "PreconditionFailedException", message)
    }
}

impl From<EventRefused> for ApiError {
    fn from(error: EventRefused) -> Self {
        match error {
            EventRefused::TooMany => {
                Self::throttled("ConcurrentInvocationLimitExceeded", error.to_string())
            }
            EventRefused::Store(_) => Self::service(&error, "the daemon cannot store the event"),
            EventRefused::Task(error) => error.into(),
        }
    }
}

impl From<ParseNameError> for ApiError {
    fn from(error: ParseNameError) -> Self {
        match error {
            ParseNameError::Mismatch => Self::invalid(error.to_string()),
            ParseNameError::Region { .. } => Self::missing(error.to_string()),
            ParseNameError::Account { .. } => Self::foreign(error.to_string()),
            ParseNameError::Function(_) | ParseNameError::Qualifier(_) => {
                Self::validation(error.to_string())
            }
        }
    }
}

impl From<SignatureError> for ApiError {
    fn from(error: SignatureError) -> Self {
        let kind = match &error {
            SignatureError::Missing => "MissingAuthenticationTokenException",
            SignatureError::UnknownKey => "UnrecognizedClientException",
            SignatureError::Invalid(_) => "InvalidSignatureException",
        };
        Self::new(StatusCode::FORBIDDEN, kind, error.to_string())
    }
}

impl From<ConfigurationError> for ApiError {
    fn from(error: ConfigurationError) -> Self {
        match error {
            ConfigurationError::Missing(field) => Self::validation(format!(
                "1 validation error detected: Value null at '{}' failed to satisfy constraint: Member must not be null",
                name(field)
            )),
            ConfigurationError::Value { field, value, rule } => {
                Self::constraint(name(field), &value, rule)
            }
            ConfigurationError::ReservedVariable(name) => Self::invalid(format!(
                "Lambda was unable to configure your environment variables because the environment variables you have \
                 provided contains reserved keys that are currently not supported for modification. Reserved keys used \
                 in this request: {name}"
            )),
            ConfigurationError::EnvironmentTooLarge => Self::invalid(format!(
                "Lambda was unable to configure your environment variables because the environment variables you have \
                 provided exceeded the {MAX_ENVIRONMENT} bytes limit."
            )),
            ConfigurationError::TooManyLayers => {
                Self::invalid("Cannot reference more than 5 layers.")
            }
            ConfigurationError::LayerTwice(one, other) => Self::invalid(format!(
                "Two different versions of the same layer are not allowed to be referenced in the same function. \
                 {one} and {other} are versions of the same layer."
            )),
            ConfigurationError::NoLayer(arn) => {
                Self::invalid(format!("Layer version {arn} does not exist."))
            }
            ConfigurationError::TooLarge(size) => Self::invalid(format!(
                "Function code combined with layers exceeds the maximum allowed size of {MAX_UNPACKED} bytes. The \
                 actual size is {size} bytes."
            )),
            ConfigurationError::Image(_)
            | ConfigurationError::Network(_)
            | ConfigurationError::RestoreHook(_)
            | ConfigurationError::SnapStart(_)
            | ConfigurationError::PlannerRefused { .. }
            | ConfigurationError::Planner(_) => Self::invalid(error.to_string()),
        }
    }
}

/// AWS Lambda's name of a part of a configuration.
fn name(field: Field) -> &'static str {
    match field {
        Field::Runtime => "runtime",
        Field::Handler => "handler",
        Field::Role => "role",
        Field::Description => "description",
        Field::Timeout => "timeout",
        Field::Memory => "memorySize",
        Field::Storage => "ephemeralStorage.size",
        Field::Variable => "environment.variables",
    }
}

impl From<CodeError> for ApiError {
    fn from(error: CodeError) -> Self {
        match error {
            CodeError::NotZip(_) => Self::invalid(
                "Could not unzip uploaded file. Please check your file, then try to upload again.",
            ),
            CodeError::TooLarge => {
                Self::invalid(format!("Unzipped size must be smaller than {MAX_UNPACKED} bytes"))
            }
            CodeError::Store { .. } => Self::service(&error, "the code cannot be stored"),
            CodeError::Empty
            | CodeError::Unreadable { .. }
            | CodeError::Path(_)
            | CodeError::Kind(_)
            | CodeError::Duplicate(_)
            | CodeError::TooMany => {
                Self::invalid(format!("Could not unzip uploaded file: {error}"))
            }
        }
    }
}

impl From<InvokeFailure> for ApiError {
    fn from(failure: InvokeFailure) -> Self {
        match failure {
            InvokeFailure::Acquire(error) => error.into(),
            InvokeFailure::Restore(_) => Self::snap_start(failure.to_string()),
            InvokeFailure::Start(LoadFailure::Start(LaunchError::Image(error))) => {
                let status = StatusCode::BAD_GATEWAY;
                Self::new(status, "InvalidRuntimeException", error.to_string())
            }
            InvokeFailure::Start(_)
            | InvokeFailure::Lost(_)
            | InvokeFailure::Undelivered(_)
            | InvokeFailure::Task(_) => {
                // The service has logged the failure.
                let status = StatusCode::INTERNAL_SERVER_ERROR;
                Self::new(status, "ServiceException", "the request was not served")
            }
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
            AcquireError::QueueFull | AcquireError::TimedOut(_) => {
                Self::throttled("ConcurrentInvocationLimitExceeded", text)
            }
            AcquireError::TooLarge(_) => {
                Self::new(StatusCode::BAD_GATEWAY, "ResourceNotReadyException", text)
            }
            AcquireError::Closed => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceException", text)
            }
        }
    }
}
