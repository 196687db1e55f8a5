//! The daemon's status and counters over HTTP.

use std::sync::Arc;

use axum::extract::State;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use firn_control::{Control, DaemonStatus};

/// The path of the status document.
pub(crate) const STATUS_PATH: &str = "/status";

/// Routes for monitoring.
pub(crate) fn routes(control: Arc<Control>) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route(STATUS_PATH, get(status))
        .with_state(control)
}

async fn metrics(State(control): State<Arc<Control>>) -> impl IntoResponse {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([("content-type", kind)], control.metrics())
}

async fn status(State(control): State<Arc<Control>>) -> Json<DaemonStatus> {
    Json(control.status())
}
