//! The function's files, name and environment.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};

use time::OffsetDateTime;
use uuid::Uuid;

use super::machine::GENERATION_FILE;
use crate::protocol::{
    Load, MAX_FUNCTION_BYTES, MAX_FUNCTION_FILES, MAX_TIME_LIMIT_MS, Put, RuntimeKind,
};

/// Why a function's files were not written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WriteError {
    #[error("cannot clear the function's directory {folder}")]
    Clear { folder: PathBuf, source: io::Error },
    #[error("cannot write {path}")]
    Write { path: PathBuf, source: io::Error },
}

/// Checks the parts of `load` that do not need the file system.
pub(crate) fn check(load: &Load) -> Result<(), String> {
    let name_byte = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if load.name.is_empty() || load.name.len() > 64 || !load.name.bytes().all(name_byte) {
        return Err("a function's name is 1 to 64 letters, digits, hyphens or underscores".into());
    }
    check_time_limit(load.time_limit_ms)?;
    if load.files.len() > MAX_FUNCTION_FILES {
        return Err(format!("a function has at most {MAX_FUNCTION_FILES} files"));
    }
    let total: usize = load.files.values().map(|bytes| bytes.0.len()).sum();
    if total > MAX_FUNCTION_BYTES {
        return Err(format!(
            "the function's files have {total} bytes; the limit is {MAX_FUNCTION_BYTES}"
        ));
    }
    load.files.keys().try_for_each(|path| check_path(path))?;
    let version = load.version.as_bytes();
    if version.is_empty() || version.len() > 64 || !version.iter().all(u8::is_ascii_graphic) {
        return Err("a version is 1 to 64 printable characters".into());
    }
    if load.snap_start && load.runtime == RuntimeKind::Own {
        return Err("SnapStart requires a runtime of AWS Lambda".into());
    }
    for (name, value) in &load.environment {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(format!("{name:?} cannot be set as an environment variable"));
        }
    }
    Ok(())
}

/// Checks the parts of `put` that do not need the file system.
pub(crate) fn check_put(put: &Put) -> Result<(), String> {
    if put.contents.0.len() > MAX_FUNCTION_BYTES {
        return Err(format!("one part of a file has at most {MAX_FUNCTION_BYTES} bytes"));
    }
    check_path(&put.path)
}

fn check_path(path: &str) -> Result<(), String> {
    let plain = Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    // `components` normalises `a//b`, `a/./b` and `a/`.
    let spelt = path.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() < 256);
    if !plain || !spelt || path.contains('\0') || path.len() > 1024 {
        return Err(format!(
            "the path {path:?} is not a valid path inside the function's directory"
        ));
    }
    Ok(())
}

/// Checks a time limit in milliseconds.
pub(crate) fn check_time_limit(time_limit_ms: u64) -> Result<(), String> {
    if (1..=MAX_TIME_LIMIT_MS).contains(&time_limit_ms) {
        Ok(())
    } else {
        Err(format!("a time limit of {time_limit_ms} ms is not in 1..={MAX_TIME_LIMIT_MS} ms"))
    }
}

/// Creates `folder`, or removes its content.
fn clear(folder: &Path) -> Result<(), WriteError> {
    let failed = |source| WriteError::Clear { folder: folder.to_owned(), source };
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => fs::create_dir_all(folder).map_err(failed),
    }
}

/// Writes `put`, which was [checked](check_put), into `folder`.
pub(crate) fn put(put: &Put, folder: &Path) -> Result<(), WriteError> {
    if put.first {
        clear(folder)?;
    }
    let path = folder.join(&put.path);
    let write = || {
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        let mut options = OpenOptions::new();
        options.create(true).write(true).append(put.append).truncate(!put.append);
        let mut file = options.open(&path)?;
        file.write_all(&put.contents.0)?;
        let mode = if put.executable { 0o755 } else { 0o644 };
        file.set_permissions(fs::Permissions::from_mode(mode))
    };
    write().map_err(|source| WriteError::Write { path: path.clone(), source })
}

/// Replaces the content of `folder` with the files of `load`, which was [checked](check). Without
/// files, keeps the files that were [put] there.
pub(crate) fn write(load: &Load, folder: &Path) -> Result<(), WriteError> {
    if load.files.is_empty() {
        return fs::create_dir_all(folder)
            .map_err(|source| WriteError::Clear { folder: folder.to_owned(), source });
    }
    clear(folder)?;
    for (name, contents) in &load.files {
        let path = folder.join(name);
        let written = path
            .parent()
            .map_or(Ok(()), fs::create_dir_all)
            .and_then(|()| fs::write(&path, &contents.0));
        written.map_err(|source| WriteError::Write { path, source })?;
    }
    Ok(())
}

/// What distinguishes this microVM from other clones; `None` before it has an identity.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ThisClone<'a> {
    pub(crate) id: Option<&'a str>,
    pub(crate) generation: Option<Uuid>,
}

/// The environment of the function: AWS Lambda's variables, then the caller's.
pub(crate) fn environment(
    load: &Load,
    folder: &Path,
    instance: ThisClone<'_>,
) -> BTreeMap<String, String> {
    let mut environment: BTreeMap<String, String> = [
        ("PATH", "/usr/local/bin:/usr/bin:/bin:/opt/bin".to_owned()),
        ("LANG", "C.UTF-8".to_owned()),
        ("TZ", ":UTC".to_owned()),
        ("HOME", "/tmp".to_owned()),
        ("LAMBDA_TASK_ROOT", folder.display().to_string()),
        ("_HANDLER", load.handler.clone()),
        ("AWS_LAMBDA_FUNCTION_NAME", load.name.clone()),
        ("AWS_LAMBDA_FUNCTION_VERSION", load.version.clone()),
        ("AWS_LAMBDA_FUNCTION_MEMORY_SIZE", load.memory_mib.to_string()),
        ("AWS_LAMBDA_LOG_GROUP_NAME", format!("/aws/lambda/{}", load.name)),
        ("AWS_LAMBDA_LOG_STREAM_NAME", log_stream_name(&load.version, instance.generation)),
        ("FIRN_INSTANCE_ID", instance.id.unwrap_or_default().to_owned()),
        ("FIRN_GENERATION_FILE", GENERATION_FILE.to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    environment.extend(load.environment.clone());
    environment
}

/// The name of this clone's log stream in AWS Lambda's form, such as
/// `2026/11/24/[$LATEST]0123456789abcdef0123456789abcdef`.
pub(crate) fn log_stream_name(version: &str, generation: Option<Uuid>) -> String {
    let today = OffsetDateTime::now_utc();
    let (year, month, day) = (today.year(), u8::from(today.month()), today.day());
    let generation = generation.unwrap_or_default().simple();
    format!("{year:04}/{month:02}/{day:02}/[{version}]{generation}")
}
