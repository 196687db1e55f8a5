//! Layers: publish, read, list, delete, and permissions.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{FromRequestParts, Path, Query as UrlQuery, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use firn_control::{LayerAbout, LayerName, LayerTarget, LayerVersion, NewLayer, Permission};
use serde::Deserialize;
use serde_json::{Value, json};

use super::authorize::{Caller, Share};
use super::body::{WithCode, ZipPlace, parse as parse_body};
use super::documents::FunctionCode;
use super::extract::{Query, ValidQuery};
use super::names::Scope;
use super::pages::page;
use super::permissions::{condition, policy, principal_of, statement_id};
use super::settings::{self, Others};
use super::{ApiError, Lambda};

/// The longest name of a layer, characters.
const MAX_NAME: usize = 140;

/// The largest number of runtimes that a layer names.
const MAX_RUNTIMES: usize = 15;

const ARCHITECTURES: [&str; 2] = ["x86_64", "arm64"];

/// The body of PublishLayerVersion.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Publish {
    description: Option<String>,
    compatible_runtimes: Option<Vec<String>>,
    compatible_architectures: Option<Vec<String>>,
    license_info: Option<String>,
    content: FunctionCode,
    #[serde(flatten)]
    others: Others,
}

/// The body of AddLayerVersionPermission.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Statement {
    statement_id: String,
    action: String,
    principal: String,
    organization_id: Option<String>,
    #[serde(flatten)]
    others: Others,
}

/// The query's parameters of lists.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "PascalCase")]
pub(super) struct Filter {
    compatible_runtime: Option<String>,
    compatible_architecture: Option<String>,
    /// `LayerVersion` for GetLayerVersionByArn.
    #[serde(rename = "find")]
    find: Option<String>,
    arn: Option<String>,
}

/// The version of a layer that a request's path names.
pub(super) struct Layer {
    lambda: Arc<Lambda>,
    target: LayerTarget,
    query: Query,
    /// The name of a statement; empty if the path names none.
    part: String,
}

impl FromRequestParts<Arc<Lambda>> for Layer {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, lambda: &Arc<Lambda>) -> Result<Self, ApiError> {
        let words = Path::<Vec<(String, String)>>::from_request_parts(parts, &()).await;
        let Path(words) = words.map_err(|error| ApiError::invalid(error.body_text()))?;
        let word = |name| words.iter().find(|(found, _)| found == name);
        let word = |name| word(name).map(|(_, word)| word.as_str()).unwrap_or_default();
        let (name, number, part) = (word("name"), word("version"), word("part").to_owned());
        let name = parse_name(name, &lambda.scope)?;
        let version = number.parse().map_err(|_| {
            ApiError::constraint("versionNumber", number, "be the number of a version")
        })?;
        let ValidQuery(query) = ValidQuery::from_request_parts(parts, lambda).await?;
        let tenant = parts.extensions.get::<Caller>().and_then(|caller| caller.0.clone());
        let target = LayerTarget { name, version, tenant };
        Ok(Self { lambda: Arc::clone(lambda), target, query, part })
    }
}

pub(super) async fn publish(
    State(lambda): State<Arc<Lambda>>,
    Path(name): Path<String>,
    Extension(share): Extension<Share>,
    Extension(Caller(tenant)): Extension<Caller>,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let decoded = lambda.with_code(body, share, ZipPlace::Content, "PublishLayerVersion").await?;
    let WithCode { request, zip, hold } = decoded;
    let request: Publish = request;
    settings::check(&request.others)?;
    settings::check(&request.content.others)?;
    let name = parse_name(&name, &lambda.scope)?;
    let about = LayerAbout {
        description: short("description", request.description.unwrap_or_default(), 256)?,
        license: request.license_info.map(|text| short("licenseInfo", text, 512)).transpose()?,
        runtimes: request.compatible_runtimes.unwrap_or_default(),
        architectures: request.compatible_architectures.unwrap_or_default(),
    };
    check(&about)?;
    let new = NewLayer { name: name.clone(), tenant, about, zip: zip?, hold };
    let version = lambda.control.publish_layer(new).await.map_err(lambda.error())?;
    Ok((StatusCode::CREATED, Json(with_content(&lambda, &name, &version))))
}

pub(super) async fn get(
    Layer { lambda, target, .. }: Layer,
) -> Result<impl IntoResponse, ApiError> {
    read(&lambda, target).await
}

async fn read(lambda: &Lambda, target: LayerTarget) -> Result<Json<Value>, ApiError> {
    let name = target.name.clone();
    let found = lambda.control.layer_version(target).await.map_err(lambda.error())?;
    Ok(Json(with_content(lambda, &name, &found.ok_or_else(ApiError::no_layer)?)))
}

/// ListLayers, or GetLayerVersionByArn.
pub(super) async fn list(
    State(lambda): State<Arc<Lambda>>,
    ValidQuery(query): ValidQuery,
    UrlQuery(filter): UrlQuery<Filter>,
    Extension(Caller(tenant)): Extension<Caller>,
) -> Result<Response, ApiError> {
    if filter.find.as_deref() == Some("LayerVersion") {
        let arn = filter.arn.unwrap_or_default();
        let LayerName { layer: name, version, .. } = parse_version(&arn, &lambda.scope)?;
        return Ok(read(&lambda, LayerTarget { name, version, tenant }).await?.into_response());
    }
    let layers = lambda.control.layers(tenant).await.map_err(lambda.error())?;
    let items = layers.iter().filter_map(|(name, versions)| {
        let latest = versions.iter().rev().find(|version| filter.fits(version))?;
        let layer = json!({
            "LayerName": name,
            "LayerArn": lambda.scope.layer(name),
            "LatestMatchingVersion": document(&lambda.scope, name, latest),
        });
        Some((format!("{name}:0"), layer))
    });
    let (layers, next) = page(items.collect(), &query)?;
    Ok(Json(json!({ "Layers": layers, "NextMarker": next })).into_response())
}

/// The versions of a layer, newest first.
pub(super) async fn list_versions(
    State(lambda): State<Arc<Lambda>>,
    Path(name): Path<String>,
    ValidQuery(query): ValidQuery,
    UrlQuery(filter): UrlQuery<Filter>,
    Extension(Caller(tenant)): Extension<Caller>,
) -> Result<impl IntoResponse, ApiError> {
    let name = parse_name(&name, &lambda.scope)?;
    let versions = lambda.control.layer_versions(name.clone(), tenant).await;
    let versions = versions.map_err(lambda.error())?;
    let items = versions.iter().rev().filter(|version| filter.fits(version)).map(|version| {
        // Pages are in the order of their keys.
        let key = u64::MAX - version.version;
        (key.to_string(), document(&lambda.scope, &name, version))
    });
    let (versions, next) = page(items.collect(), &query)?;
    Ok(Json(json!({ "LayerVersions": versions, "NextMarker": next })))
}

pub(super) async fn delete(
    Layer { lambda, target, .. }: Layer,
) -> Result<impl IntoResponse, ApiError> {
    lambda.control.delete_layer(target).await.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn get_policy(
    Layer { lambda, target, .. }: Layer,
) -> Result<impl IntoResponse, ApiError> {
    let arn = lambda.scope.layer_version(&target.name, target.version);
    let found = lambda.control.layer_version(target).await.map_err(lambda.error())?;
    let found = found.ok_or_else(ApiError::no_layer)?;
    let (permissions, revision) = found.policy();
    if permissions.is_empty() {
        let message = "No policy is associated with the given resource.";
        return Err(ApiError::missing(message.to_owned()));
    }
    Ok(Json(policy(&arn, permissions, &revision)))
}

pub(super) async fn add_permission(
    Layer { lambda, target, query, .. }: Layer,
    body: Bytes,
) -> Result<impl IntoResponse, ApiError> {
    let request: Statement = parse_body(&body)?;
    settings::check(&request.others)?;
    if request.action != "lambda:GetLayerVersion" {
        let rule = "satisfy regular expression pattern: lambda:GetLayerVersion";
        return Err(ApiError::constraint("action", &request.action, rule));
    }
    if request.organization_id.is_some() && request.principal != "*" {
        return Err(ApiError::invalid("OrganizationId requires the principal *"));
    }
    let new = Permission {
        id: statement_id(request.statement_id)?,
        action: request.action,
        principal: principal_of(request.principal)?,
        conditions: condition("StringEquals", "aws:PrincipalOrgID", request.organization_id)
            .into_iter()
            .collect(),
    };
    let arn = lambda.scope.layer_version(&target.name, target.version);
    let statement = super::permissions::statement(&arn, &new).to_string();
    let added = lambda.control.add_layer_permission(target, new, query.revision_id).await;
    let revision = added.map_err(lambda.error())?;
    Ok((StatusCode::CREATED, Json(json!({ "Statement": statement, "RevisionId": revision }))))
}

pub(super) async fn remove_permission(
    Layer { lambda, target, query, part }: Layer,
) -> Result<impl IntoResponse, ApiError> {
    let removed = lambda.control.remove_layer_permission(target, part, query.revision_id).await;
    removed.map_err(lambda.error())?;
    Ok(StatusCode::NO_CONTENT)
}

impl Filter {
    /// Whether a list has a version. A version without runtimes or architectures fits none that is
    /// named.
    fn fits(&self, version: &LayerVersion) -> bool {
        let has = |wanted: &Option<String>, all: &[String]| {
            wanted.as_ref().is_none_or(|wanted| all.contains(wanted))
        };
        has(&self.compatible_runtime, &version.about.runtimes)
            && has(&self.compatible_architecture, &version.about.architectures)
    }
}

impl Scope {
    fn layer(&self, name: &str) -> String {
        format!("arn:aws:lambda:{}:{}:layer:{name}", self.region, self.account)
    }

    /// The ARN of a version of a layer.
    pub(super) fn layer_version(&self, name: &str, version: u64) -> String {
        format!("{}:{version}", self.layer(name))
    }
}

/// The layers that a function's configuration names.
pub(super) fn names(arns: &[String], scope: &Scope) -> Result<Vec<LayerName>, ApiError> {
    arns.iter().map(|arn| parse_version(arn, scope)).collect()
}

/// Reads the ARN of a version of a layer.
fn parse_version(arn: &str, scope: &Scope) -> Result<LayerName, ApiError> {
    let parsed = arn.rsplit_once(':').filter(|_| arn.starts_with("arn:"));
    let parsed = parsed.and_then(|(layer, number)| Some((layer, number.parse().ok()?)));
    let invalid = || ApiError::constraint("layers", arn, "be the ARN of a layer's version");
    let (layer, version) = parsed.ok_or_else(invalid)?;
    let layer = parse_arn(layer, scope)?.ok_or_else(invalid)?;
    Ok(LayerName { layer, version, arn: arn.to_owned() })
}

/// Reads a layer's name, or its ARN.
fn parse_name(text: &str, scope: &Scope) -> Result<String, ApiError> {
    let name = match text.starts_with("arn:") {
        true => parse_arn(text, scope)?,
        false => Some(text.to_owned()).filter(|name| is_name(name)),
    };
    let rule = "be the ARN of a layer, or 1 to 140 letters, digits, hyphens or underscores";
    name.ok_or_else(|| ApiError::constraint("layerName", text, rule))
}

/// The name in a layer's ARN; `None` if it is not one.
fn parse_arn(arn: &str, scope: &Scope) -> Result<Option<String>, ApiError> {
    let parts: Vec<&str> = arn.split(':').collect();
    let ["arn", "aws", "lambda", region, account, "layer", name] = parts[..] else {
        return Ok(None);
    };
    if !is_name(name) {
        return Ok(None);
    }
    if region != scope.region {
        return Err(ApiError::invalid(format!(
            "Layers are not in the same region as the function. Layers are expected to be in region {}.",
            scope.region
        )));
    }
    if account != scope.account {
        return Err(ApiError::foreign(format!(
            "layers of the account {account} are not accessible: the account of this daemon is {}",
            scope.account
        )));
    }
    Ok(Some(name.to_owned()))
}

fn is_name(name: &str) -> bool {
    let word = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(word)
}

fn short(field: &str, text: String, limit: usize) -> Result<String, ApiError> {
    if text.chars().count() > limit {
        let rule = format!("have length less than or equal to {limit}");
        return Err(ApiError::constraint(field, &text, &rule));
    }
    Ok(text)
}

fn check(about: &LayerAbout) -> Result<(), ApiError> {
    if about.runtimes.len() > MAX_RUNTIMES {
        let rule = "have length less than or equal to 15";
        return Err(ApiError::constraint("compatibleRuntimes", &about.runtimes.join(", "), rule));
    }
    let plain = |name: &&String| {
        let part = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'.';
        name.is_empty() || name.len() > 32 || !name.bytes().all(part)
    };
    if let Some(name) = about.runtimes.iter().find(plain) {
        return Err(ApiError::constraint("compatibleRuntimes", name, "be the name of a runtime"));
    }
    let other = |name: &&String| !ARCHITECTURES.contains(&name.as_str());
    if let Some(name) = about.architectures.iter().find(other) {
        let rule = "satisfy enum value set: [x86_64, arm64]";
        return Err(ApiError::constraint("compatibleArchitectures", name, rule));
    }
    Ok(())
}

/// A version in lists.
fn document(scope: &Scope, name: &str, version: &LayerVersion) -> Value {
    let LayerAbout { description, license, runtimes, architectures } = &version.about;
    let mut document = json!({
        "LayerVersionArn": scope.layer_version(name, version.version),
        "Version": version.version,
        "Description": description,
        "CreatedDate": version.created,
    });
    for (key, list) in
        [("CompatibleRuntimes", runtimes), ("CompatibleArchitectures", architectures)]
    {
        if !list.is_empty() {
            document[key] = json!(list);
        }
    }
    if let Some(license) = license {
        document["LicenseInfo"] = json!(license);
    }
    document
}

/// A version with its zip file.
fn with_content(lambda: &Lambda, name: &str, version: &LayerVersion) -> Value {
    let mut document = document(&lambda.scope, name, version);
    document["LayerArn"] = json!(lambda.scope.layer(name));
    document["Content"] = json!({
        "Location": lambda.control.layer_path(version).display().to_string(),
        "CodeSha256": version.code.sha256_base64(),
        "CodeSize": version.code.size,
    });
    document
}
