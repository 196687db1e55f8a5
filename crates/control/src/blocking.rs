//! Runs blocking work on the runtime's threads for it.

/// A task of the daemon panicked or was cancelled.
#[derive(Debug, thiserror::Error)]
#[error("a task of the daemon failed")]
pub struct TaskFailed(#[from] tokio::task::JoinError);

/// Runs `work`, which waits for the disk, without blocking the runtime.
pub(crate) async fn blocking<T: Send + 'static, E: From<TaskFailed> + Send + 'static>(
    work: impl FnOnce() -> Result<T, E> + Send + 'static,
) -> Result<T, E> {
    tokio::task::spawn_blocking(work).await.map_err(TaskFailed)?
}
