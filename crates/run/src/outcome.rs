//! What a request to a function came to.

use firn_agent::protocol::FunctionError;
use firn_base::nanoseconds;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::agent::{Answer, InvokeError};

/// The answer of a function, or its failure.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// The function's answer, as JSON.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub answer: Option<Box<RawValue>>,
    /// The function's error.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<FunctionError>,
    /// The end of what it printed, as the guest sent it: control characters included.
    pub logs: String,
    /// Time in the function, by the guest's clock, ns; 0 where it failed.
    pub function_ns: u64,
}

impl Outcome {
    /// The outcome of a request that reached the function, also where the function failed.
    ///
    /// # Errors
    /// The request did not reach the function, or its answer was lost.
    pub fn of(result: Result<Answer, InvokeError>) -> Result<Self, InvokeError> {
        match result {
            Ok(answer) => Ok(Self {
                function_ns: nanoseconds(answer.duration),
                // What a function streams may be no JSON.
                answer: serde_json::from_slice(&answer.payload).ok(),
                error: None,
                logs: answer.logs,
            }),
            Err(InvokeError::Function(failed)) => Ok(Self {
                answer: None,
                error: Some(failed.error),
                logs: failed.logs.into(),
                function_ns: 0,
            }),
            Err(error) => Err(error),
        }
    }
}
