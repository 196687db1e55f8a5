//! AWS Lambda's names of functions: a name, a partial ARN or an ARN, each with or without a
//! qualifier.

use std::fmt;

use firn_control::{NameError, Target};

/// Region and account, which are part of each ARN.
#[derive(Debug, Clone)]
pub(crate) struct Scope {
    /// The region, such as `us-east-1`.
    pub(crate) region: String,
    /// The account: 12 digits.
    pub(crate) account: String,
}

/// A function's name in a request is not valid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ParseNameError {
    #[error(
        "Value '{0}' at 'functionName' failed to satisfy constraint: a function's name has 1 to 64 letters, digits, \
         hyphens or underscores; an ARN ends in such a name"
    )]
    Function(String),
    #[error(
        "Value '{0}' at 'qualifier' failed to satisfy constraint: a version is $LATEST or a number, an alias has 1 to \
         128 letters, digits, hyphens or underscores and is not a number"
    )]
    Qualifier(String),
    #[error("Functions from '{region}' are not reachable in this region ('{own}')")]
    Region { region: String, own: String },
    #[error(
        "functions of the account {account} are not accessible: the account of this daemon is {own}"
    )]
    Account { account: String, own: String },
    #[error("The derived qualifier from the function name does not match the specified qualifier.")]
    Mismatch,
}

/// Reads the function's name in a request's path, and the qualifier in its query. The ARN of a
/// function of another region or account is an error.
pub(super) fn parse(
    name: &str,
    qualifier: Option<&str>,
    scope: &Scope,
) -> Result<Target, ParseNameError> {
    let invalid = || ParseNameError::Function(name.to_owned());
    // [arn:aws:lambda:REGION:][ACCOUNT:][function:]NAME[:QUALIFIER]
    let (region, rest) = match name.strip_prefix("arn:") {
        Some(arn) => {
            let arn = arn.strip_prefix("aws:lambda:").and_then(|arn| arn.split_once(':'));
            let (region, rest) = arn.ok_or_else(invalid)?;
            (Some(region), rest)
        }
        None => (None, name),
    };
    let (account, rest) = match rest.split_once(":function:") {
        Some((account, rest)) if is_account(account) => (Some(account), rest),
        Some(_) => return Err(invalid()),
        None if region.is_some() => return Err(invalid()),
        None => (None, rest.strip_prefix("function:").unwrap_or(rest)),
    };
    if let Some(region) = region.filter(|region| *region != scope.region) {
        let own = scope.region.clone();
        return Err(ParseNameError::Region { region: region.to_owned(), own });
    }
    if let Some(account) = account.filter(|account| *account != scope.account) {
        let own = scope.account.clone();
        return Err(ParseNameError::Account { account: account.to_owned(), own });
    }
    let (function, derived) = match rest.split_once(':') {
        Some((function, derived)) => (function, Some(derived)),
        None => (rest, None),
    };
    let target = Target::new(function, derived.or(qualifier)).map_err(|error| match error {
        NameError::Function(_) => invalid(),
        NameError::Qualifier(qualifier) => ParseNameError::Qualifier(qualifier),
    });
    // A name that is not valid is reported before qualifiers that differ.
    match target {
        Err(ParseNameError::Qualifier(_)) | Ok(_)
            if derived.is_some() && qualifier.is_some() && derived != qualifier =>
        {
            Err(ParseNameError::Mismatch)
        }
        target => target,
    }
}

/// A function's ARN, with a qualifier or without.
#[derive(Debug)]
pub(crate) struct Arn<'a> {
    scope: &'a Scope,
    function: &'a str,
    qualifier: Option<&'a str>,
}

impl Scope {
    /// The ARN of the function `function`, or of its version or alias `qualifier`.
    pub(super) fn arn<'a>(&'a self, function: &'a str, qualifier: Option<&'a str>) -> Arn<'a> {
        Arn { scope: self, function, qualifier }
    }

    /// The ARN of what `target` names.
    pub(crate) fn arn_of<'a>(&'a self, target: &'a Target) -> Arn<'a> {
        self.arn(target.name(), target.qualifier())
    }
}

impl fmt::Display for Arn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope: Scope { region, account }, function, qualifier } = self;
        write!(f, "arn:aws:lambda:{region}:{account}:function:{function}")?;
        qualifier.map_or(Ok(()), |qualifier| write!(f, ":{qualifier}"))
    }
}

fn is_account(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
#[path = "names_tests.rs"]
mod tests;
