//! Names of functions, as AWS Lambda takes them: a name, a partial ARN, an ARN, each with or without a qualifier.

use std::fmt;

/// The longest name of a function, in characters.
const MAX_NAME: usize = 64;

/// The longest qualifier, in characters.
const MAX_QUALIFIER: usize = 128;

/// Where the functions are, in their ARNs.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// The region, such as `us-east-1`.
    pub(crate) region: String,
    /// The account: 12 digits.
    pub(crate) account: String,
}

/// A function that a request names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// Its name alone.
    pub(crate) name: String,
    /// A version or an alias.
    pub(crate) qualifier: Option<String>,
}

/// A name that AWS Lambda would not take.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NameError {
    #[error(
        "Value '{0}' at 'functionName' failed to satisfy constraint: a function is named by 1 to {MAX_NAME} \
         letters, digits, hyphens or underscores, or by an ARN that ends in such a name"
    )]
    Function(String),
    #[error(
        "Value '{0}' at 'qualifier' failed to satisfy constraint: a version is $LATEST or a number, an alias 1 to \
         {MAX_QUALIFIER} letters, digits, hyphens or underscores that are not all digits"
    )]
    Qualifier(String),
    #[error("The derived qualifier from the function name does not match the specified qualifier.")]
    Mismatch,
}

impl Target {
    /// Reads `named`, from a request's path, and `qualifier`, from its query.
    pub(crate) fn parse(named: &str, qualifier: Option<&str>) -> Result<Self, NameError> {
        let unknown = || NameError::Function(named.to_owned());
        let rest = match named.strip_prefix("arn:") {
            // arn:PARTITION:lambda:REGION:ACCOUNT:function:NAME[:QUALIFIER]
            Some(arn) => {
                let mut parts = arn.splitn(5, ':');
                let (_, service) = (parts.next(), parts.next());
                let rest = parts.nth(2).filter(|_| service == Some("lambda"));
                rest.and_then(|rest| rest.strip_prefix("function:")).ok_or_else(unknown)?
            }
            None => match named.split_once(":function:") {
                Some((account, rest)) if is_account(account) => rest,
                Some(_) => return Err(unknown()),
                None => named.strip_prefix("function:").unwrap_or(named),
            },
        };
        let (name, derived) = match rest.split_once(':') {
            Some((name, derived)) => (name, Some(derived)),
            None => (rest, None),
        };
        if !is_word(name, MAX_NAME) {
            return Err(unknown());
        }
        if derived.is_some() && qualifier.is_some() && derived != qualifier {
            return Err(NameError::Mismatch);
        }
        let qualifier = derived.or(qualifier);
        if let Some(qualifier) = qualifier.filter(|qualifier| !is_qualifier(qualifier)) {
            return Err(NameError::Qualifier(qualifier.to_owned()));
        }
        Ok(Self { name: name.to_owned(), qualifier: qualifier.map(ToOwned::to_owned) })
    }
}

/// A function's ARN, with its qualifier where there is one.
#[derive(Debug)]
pub(crate) struct Arn<'a>(pub(crate) &'a Place, pub(crate) &'a str, pub(crate) Option<&'a str>);

impl fmt::Display for Arn<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Place { region, account }, name, qualifier) = self;
        write!(f, "arn:aws:lambda:{region}:{account}:function:{name}")?;
        qualifier.map_or(Ok(()), |qualifier| write!(f, ":{qualifier}"))
    }
}

/// Whether an alias can have this name: versions are numbers.
pub(crate) fn is_alias(name: &str) -> bool {
    is_word(name, MAX_QUALIFIER) && !name.bytes().all(|byte| byte.is_ascii_digit())
}

fn is_qualifier(text: &str) -> bool {
    text == super::LATEST || is_word(text, MAX_QUALIFIER)
}

fn is_word(text: &str, longest: usize) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    (1..=longest).contains(&text.len()) && text.bytes().all(fits)
}

fn is_account(text: &str) -> bool {
    text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
#[path = "name_tests.rs"]
mod tests;
