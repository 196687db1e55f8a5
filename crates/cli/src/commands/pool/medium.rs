//! Parsing of media on the command line.

use std::path::PathBuf;

use firn_base::parse_size;
use firn_pool::{Huge, MemfdOptions};

/// `/dev/dax0.0`, a file's path, or `memfd:SIZE[,huge[=1G]][,node=N]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum MediumName {
    Path(PathBuf),
    Memfd(MemfdOptions),
}

/// Parses a medium.
pub(crate) fn parse(text: &str) -> Result<MediumName, String> {
    let Some(text) = text.strip_prefix("memfd:") else {
        return Ok(MediumName::Path(PathBuf::from(text)));
    };
    let mut parts = text.split(',');
    let size = parse_size(parts.next().unwrap_or_default()).map_err(|error| error.to_string())?;
    let mut options = MemfdOptions { size, huge: None, node: None };
    for part in parts {
        match part.split_once('=') {
            None if part == "huge" => options.huge = Some(Huge::Size2M),
            Some(("huge", "2M")) => options.huge = Some(Huge::Size2M),
            Some(("huge", "1G")) => options.huge = Some(Huge::Size1G),
            Some(("node", node)) => {
                let node =
                    node.parse().map_err(|_| format!("{node:?} is not a NUMA node number"))?;
                options.node = Some(node);
            }
            _ => {
                return Err(format!("{part:?} is not a memfd option: use huge, huge=1G or node=N"));
            }
        }
    }
    Ok(MediumName::Memfd(options))
}
