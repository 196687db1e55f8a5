//! How events are retried, and their destinations: PutFunctionEventInvokeConfig and what goes with
//! it.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use firn_control::{Destination, EventSettings, FindError, LATEST, Target};
use serde::Deserialize;
use serde_json::{Value, json};

use super::body::parse;
use super::extract::{Qualified, Unqualified};
use super::names::parse as parse_name;
use super::pages::page;
use super::settings::{self, Others};
use super::{ApiError, Lambda};

/// The body of PutFunctionEventInvokeConfig and UpdateFunctionEventInvokeConfig.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Request {
    maximum_retry_attempts: Option<u32>,
    maximum_event_age_in_seconds: Option<u32>,
    destination_config: Option<DestinationConfig>,
    #[serde(flatten)]
    others: Others,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default, deny_unknown_fields)]
struct DestinationConfig {
    on_success: Place,
    on_failure: Place,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase", default, deny_unknown_fields)]
struct Place {
    destination: Option<String>,
}

/// Sets all settings: those that the request does not have get their defaults.
pub(super) async fn put(
    Qualified { lambda, target, .. }: Qualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let (new, _) = read(&lambda, &target, &body).await?;
    let set = lambda.control.set_event_settings(&target, move |_| Some(new)).await;
    let set = set.map_err(lambda.error())?.unwrap_or_default();
    Ok(Json(document(&lambda, target.name(), target.qualifier(), set)))
}

/// Changes the settings that the request has.
pub(super) async fn update(
    Qualified { lambda, target, .. }: Qualified,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let (new, has_destinations) = read(&lambda, &target, &body).await?;
    let changed = lambda.control.set_event_settings(&target, move |old| {
        let old = old?;
        let (retries, max_age) = (new.retries.or(old.retries), new.max_age.or(old.max_age));
        let EventSettings { on_success, on_failure, .. } =
            if has_destinations { new.clone() } else { old };
        Some(EventSettings { retries, max_age, on_success, on_failure, ..new })
    });
    let changed = changed.await.map_err(lambda.error())?;
    let changed = changed.ok_or_else(|| missing(&lambda, &target))?;
    Ok(Json(document(&lambda, target.name(), target.qualifier(), changed)))
}

pub(super) async fn get(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    let found = lambda.control.event_settings(&target).await.map_err(lambda.error())?;
    let found = found.ok_or_else(|| missing(&lambda, &target))?;
    Ok(Json(document(&lambda, target.name(), target.qualifier(), found)))
}

pub(super) async fn list(
    Unqualified { lambda, target, query, .. }: Unqualified,
) -> Result<impl IntoResponse, ApiError> {
    let all = lambda.control.all_event_settings(&target).await.map_err(lambda.error())?;
    let items = all.into_iter().map(|(qualifier, settings)| {
        let document = document(&lambda, target.name(), Some(&qualifier), settings);
        (qualifier, document)
    });
    let (configs, next) = page(items.collect(), &query)?;
    Ok(Json(json!({ "FunctionEventInvokeConfigs": configs, "NextMarker": next })))
}

pub(super) async fn delete(
    Qualified { lambda, target, .. }: Qualified,
) -> Result<impl IntoResponse, ApiError> {
    match lambda.control.delete_event_settings(&target).await.map_err(lambda.error())? {
        true => Ok(StatusCode::NO_CONTENT),
        false => Err(missing(&lambda, &target)),
    }
}

/// The settings in a request, and whether it has destinations.
async fn read(
    lambda: &Lambda,
    target: &Target,
    body: &[u8],
) -> Result<(EventSettings, bool), ApiError> {
    let request: Request = parse(body)?;
    settings::check(&request.others)?;
    let within = |name: &str, value: Option<u32>, least: u32, most: u32| match value {
        Some(value) if !(least..=most).contains(&value) => {
            let rule = format!("be between {least} and {most}");
            Err(ApiError::constraint(name, &value.to_string(), &rule))
        }
        value => Ok(value),
    };
    let modified = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let has_destinations = request.destination_config.is_some();
    let DestinationConfig { on_success, on_failure } =
        request.destination_config.unwrap_or_default();
    let settings = EventSettings {
        on_success: destination(lambda, target, on_success).await?,
        on_failure: destination(lambda, target, on_failure).await?,
        retries: within("maximumRetryAttempts", request.maximum_retry_attempts, 0, 2)?,
        max_age: within(
            "maximumEventAgeInSeconds",
            request.maximum_event_age_in_seconds,
            60,
            21_600,
        )?,
        modified,
    };
    Ok((settings, has_destinations))
}

/// The function that a setting of `target` names, if it names one.
async fn destination(
    lambda: &Lambda,
    target: &Target,
    Place { destination: arn }: Place,
) -> Result<Option<Destination>, ApiError> {
    let Some(arn) = arn.filter(|arn| !arn.is_empty()) else { return Ok(None) };
    if !arn.starts_with("arn:aws:lambda:") {
        return Err(ApiError::invalid(format!(
            "DestinationConfig: only functions of this daemon can be destinations, by their ARN; {arn} is none"
        )));
    }
    let to = target.of_same_tenant(parse_name(&arn, None, &lambda.scope)?);
    if to.name() == target.name() {
        let message = "You can't specify the function as a destination for itself.";
        return Err(ApiError::invalid(message));
    }
    match lambda.control.find(&to).await {
        Ok(_) => Ok(Some(Destination { target: to, arn })),
        Err(FindError::NotFound(_)) => {
            Err(ApiError::invalid(format!("The destination ARN {arn} is invalid.")))
        }
        Err(error) => Err(lambda.error()(error)),
    }
}

fn missing(lambda: &Lambda, target: &Target) -> ApiError {
    let arn = lambda.scope.arn(target.name(), Some(target.qualifier().unwrap_or(LATEST)));
    ApiError::missing(format!("The function {arn} doesn't have an EventInvokeConfig"))
}

fn place(destination: Option<Destination>) -> Value {
    destination.map_or_else(|| json!({}), |to| json!({ "Destination": to.arn }))
}

fn document(
    lambda: &Lambda,
    name: &str,
    qualifier: Option<&str>,
    settings: EventSettings,
) -> Value {
    let mut document = json!({
        "LastModified": settings.modified,
        "FunctionArn": lambda.scope.arn(name, Some(qualifier.unwrap_or(LATEST))).to_string(),
        "DestinationConfig": {
            "OnSuccess": place(settings.on_success),
            "OnFailure": place(settings.on_failure),
        },
    });
    if let Some(retries) = settings.retries {
        document["MaximumRetryAttempts"] = json!(retries);
    }
    if let Some(max_age) = settings.max_age {
        document["MaximumEventAgeInSeconds"] = json!(max_age);
    }
    document
}
