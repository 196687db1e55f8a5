//! The registry of planners by name: `name[:key=value,…]`.

use std::ops::RangeInclusive;

use firn_snapshot::CHUNK_PAGES;
use thiserror::Error;

use super::{
    DramCached, FaaSnap, Faast, Firecracker, Firn, Pass, PassShared, PlanInput, Planner,
    PlannerError, Prefetch, Reap, SnapBpf, VanillaDax,
};
use crate::copy_ahead::{Granule, Rule};
use crate::pager::PagerPolicy;

/// A planner's name, its options, and its constructor, which takes one value for each option.
struct Entry {
    name: &'static str,
    options: &'static [OptionEntry],
    make: fn(&[Value]) -> Box<dyn Planner>,
}

struct OptionEntry {
    key: &'static str,
    values: Values,
}

/// The values of an option.
enum Values {
    /// One of these words; the first is the default.
    Words(&'static [&'static str]),
    /// The same, where `all` selects the default alone.
    Setting(&'static [&'static str]),
    /// A number out of a range.
    Number { default: u64, range: RangeInclusive<u64> },
    /// A power of two up to `max`; 1 is the default.
    Power { max: u64 },
}

/// A value of an option.
#[derive(Clone, Copy, PartialEq)]
enum Value {
    Word(&'static str),
    Number(u64),
}

impl Values {
    fn default(&self) -> Option<Value> {
        match self {
            Self::Words(words) | Self::Setting(words) => {
                words.first().map(|word| Value::Word(word))
            }
            Self::Number { default, .. } => Some(Value::Number(*default)),
            Self::Power { .. } => Some(Value::Number(1)),
        }
    }

    fn parse(&self, text: &str) -> Option<Value> {
        match self {
            Self::Words(words) | Self::Setting(words) => {
                words.iter().find(|word| **word == text).map(|word| Value::Word(word))
            }
            Self::Number { range, .. } => {
                let digits = text.bytes().all(|byte| byte.is_ascii_digit());
                let number = text.parse().ok().filter(|number| digits && range.contains(number));
                number.map(Value::Number)
            }
            Self::Power { max } => Self::Number { default: 1, range: 1..=*max }
                .parse(text)
                .filter(|value| matches!(value, Value::Number(n) if n.is_power_of_two())),
        }
    }

    /// The values that `all` selects: every word; of settings and numbers, the default.
    fn all(&self) -> Vec<Value> {
        match self {
            Self::Words(words) => words.iter().map(|word| Value::Word(word)).collect(),
            Self::Number { default, .. } => vec![Value::Number(*default)],
            Self::Power { .. } => vec![Value::Number(1)],
            Self::Setting(_) => self.default().into_iter().collect(),
        }
    }

    /// The possible values, as text for an error.
    fn known(&self, or: &str) -> String {
        match self {
            Self::Words(words) | Self::Setting(words) => words.join(or),
            Self::Number { range, .. } => format!("{} to {}", range.start(), range.end()),
            Self::Power { max } => format!("a power of two up to {max}"),
        }
    }
}

/// A part of a system that can be left out.
const SWITCH: Values = Values::Setting(&["on", "off"]);
const ON: Value = Value::Word("on");

/// Pages that one fault fills: the papers' systems fill one.
const GRANULE: &[OptionEntry] =
    &[OptionEntry { key: "granule", values: Values::Power { max: PagerPolicy::MAX_GRANULE } }];

/// The value of `granule`.
fn granule(values: &[Value]) -> PagerPolicy {
    let pages = match values {
        [Value::Number(pages)] => PagerPolicy::with_granule(*pages),
        _ => None,
    };
    pages.unwrap_or_default()
}

/// Every planner, in the order of `all`.
const PLANNERS: &[Entry] = &[
    Entry {
        name: "firecracker",
        options: &[OptionEntry { key: "readahead", values: Values::Words(&["on", "off"]) }],
        make: |values| Box::new(Firecracker { readahead: values == [Value::Word("on")] }),
    },
    Entry { name: "dram_cached", options: &[], make: |_| Box::new(DramCached) },
    Entry { name: "vanilla_dax", options: &[], make: |_| Box::new(VanillaDax) },
    Entry {
        name: "faasnap",
        options: &[
            OptionEntry {
                key: "merge",
                values: Values::Number { default: FaaSnap::MERGE, range: 0..=FaaSnap::MAX_MERGE },
            },
            OptionEntry { key: "paging", values: SWITCH },
            OptionEntry { key: "regions", values: SWITCH },
            OptionEntry { key: "loading_set", values: SWITCH },
        ],
        make: |values| match values {
            [Value::Number(merge), paging, regions, loading_set] => Box::new(FaaSnap {
                merge: *merge,
                paging: *paging == ON,
                regions: *regions == ON,
                loading_set: *loading_set == ON,
            }),
            _ => Box::new(FaaSnap::default()),
        },
    },
    Entry {
        name: "snapbpf",
        options: &[
            OptionEntry { key: "prefetch", values: Values::Setting(&["on", "kernel", "off"]) },
            OptionEntry { key: "marking", values: SWITCH },
        ],
        make: |values| match values {
            [prefetch, marking] => {
                let prefetch = match prefetch {
                    Value::Word("kernel") => Prefetch::Kernel,
                    Value::Word("off") => Prefetch::Off,
                    _ => Prefetch::Loader,
                };
                Box::new(SnapBpf { prefetch, marking: *marking == ON })
            }
            _ => Box::new(SnapBpf::default()),
        },
    },
    Entry {
        name: "reap",
        options: GRANULE,
        make: |values| Box::new(Reap { policy: granule(values) }),
    },
    Entry {
        name: "faast",
        options: GRANULE,
        make: |values| Box::new(Faast { policy: granule(values) }),
    },
    Entry { name: "pass", options: &[], make: |_| Box::new(Pass) },
    Entry { name: "pass_shared", options: &[], make: |_| Box::new(PassShared) },
    Entry {
        name: "firn",
        options: &[
            OptionEntry {
                key: "copy",
                values: Values::Number { default: Rule::DEFAULT.written, range: 1..=CHUNK_PAGES },
            },
            OptionEntry {
                key: "read",
                values: Values::Number { default: Rule::DEFAULT.read, range: 0..=CHUNK_PAGES },
            },
            OptionEntry {
                key: "granule",
                values: Values::Setting(&["2m", "auto", "4k", "16k", "64k"]),
            },
            OptionEntry { key: "learn", values: Values::Setting(&["on", "off"]) },
        ],
        make: |values| match values {
            [
                Value::Number(written),
                Value::Number(read),
                Value::Word(granule),
                Value::Word(learn),
            ] => {
                let granule = Granule::of_name(granule).unwrap_or(Rule::DEFAULT.granule);
                let rule = Rule { written: *written, read: *read, granule, learn: *learn == "on" };
                Box::new(Firn { rule })
            }
            _ => Box::new(Firn { rule: Rule::DEFAULT }),
        },
    },
];

/// Why a text does not name a planner.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ParsePlannerError {
    /// No planner has this name.
    #[error("unknown planner {name:?}; use one of {known}")]
    UnknownPlanner {
        /// The name.
        name: String,
        /// The known names.
        known: String,
    },
    /// The planner has no such option.
    #[error("planner {planner} has no option {option:?}; it takes {known}")]
    UnknownOption {
        /// The planner.
        planner: &'static str,
        /// The option.
        option: String,
        /// The known options with their values.
        known: String,
    },
    /// The value is not valid.
    #[error("option {option} of planner {planner} cannot be {value:?}; use {known}")]
    UnknownValue {
        /// The planner.
        planner: &'static str,
        /// The option.
        option: &'static str,
        /// The value.
        value: String,
        /// The possible values.
        known: String,
    },
    /// The option is given twice.
    #[error("option {option} of planner {planner} is given twice")]
    Repeated {
        /// The planner.
        planner: &'static str,
        /// The option.
        option: &'static str,
    },
}

/// Returns the planner that a text names: `firecracker`, `firecracker:readahead=off`.
///
/// # Errors
///
/// [`ParsePlannerError`], which lists the known names, options or values.
///
/// # Examples
///
/// ```
/// use firn_memory::planners::parse;
///
/// let planner = parse("faasnap:merge=0")?;
/// assert_eq!(planner.name(), "faasnap:merge=0");
/// assert!(planner.uses_profile());
/// assert!(parse("faasnap:marge=0").is_err());
/// # Ok::<(), firn_memory::planners::ParsePlannerError>(())
/// ```
pub fn parse(text: &str) -> Result<Box<dyn Planner>, ParsePlannerError> {
    let (name, options) = match text.split_once(':') {
        Some((name, options)) => (name, Some(options)),
        None => (text, None),
    };
    let entry = PLANNERS.iter().find(|entry| entry.name == name).ok_or_else(|| {
        let known: Vec<_> = PLANNERS.iter().map(|entry| entry.name).collect();
        ParsePlannerError::UnknownPlanner { name: name.to_owned(), known: known.join(", ") }
    })?;
    let mut values: Vec<Option<Value>> = vec![None; entry.options.len()];
    for option in options.into_iter().flat_map(|options| options.split(',')) {
        let (index, value) = entry.parse_option(option)?;
        if values[index].replace(value).is_some() {
            let (planner, option) = (entry.name, entry.options[index].key);
            return Err(ParsePlannerError::Repeated { planner, option });
        }
    }
    let defaults = entry.options.iter().map(|option| option.values.default());
    let values: Vec<Value> =
        values.into_iter().zip(defaults).filter_map(|(value, default)| value.or(default)).collect();
    Ok((entry.make)(&values))
}

impl Entry {
    /// The index of an option written `key=value`, and its value.
    fn parse_option(&self, text: &str) -> Result<(usize, Value), ParsePlannerError> {
        let (key, value) = text.split_once('=').unwrap_or((text, ""));
        let index = self.options.iter().position(|option| option.key == key);
        let index = index.ok_or_else(|| ParsePlannerError::UnknownOption {
            planner: self.name,
            option: key.to_owned(),
            known: self.known_options(),
        })?;
        let option = &self.options[index];
        let parsed = option.values.parse(value).ok_or_else(|| ParsePlannerError::UnknownValue {
            planner: self.name,
            option: option.key,
            value: value.to_owned(),
            known: option.values.known(" or "),
        })?;
        Ok((index, parsed))
    }

    fn known_options(&self) -> String {
        if self.options.is_empty() {
            return "none".to_owned();
        }
        let options = self.options.iter().map(|o| format!("{}={}", o.key, o.values.known("|")));
        options.collect::<Vec<_>>().join(", ")
    }

    /// The planner in every combination of its options' values, defaults first; numbers stay at
    /// their default.
    fn variants(&self) -> Vec<Box<dyn Planner>> {
        let mut combinations: Vec<Vec<Value>> = vec![Vec::new()];
        for option in self.options {
            let extended = combinations.iter().flat_map(|chosen| {
                let values = option.values.all().into_iter();
                values.map(move |value| [chosen.as_slice(), &[value]].concat())
            });
            combinations = extended.collect();
        }
        combinations.iter().map(|values| (self.make)(values)).collect()
    }
}

/// Planners selected for a snapshot on this host.
pub struct Selection {
    /// The selected planners, in the order of the list.
    pub planners: Vec<Box<dyn Planner>>,
    /// The planners that `all` excludes, with the reason.
    pub left_out: Vec<(String, PlannerError)>,
}

/// The planners of a list, separated by commas: `firecracker:readahead=off,dram_cached`. A part
/// with `=` and without `:` is a further option of the planner before it. `all` selects every
/// planner, with every word of its options, that returns a plan for `input`. A planner that is
/// named is selected even if it returns none, so that its error is reported when the plan is made.
///
/// # Errors
///
/// [`ParsePlannerError`] of the first part that is not valid.
pub fn select(list: &str, input: &PlanInput<'_>) -> Result<Selection, ParsePlannerError> {
    let mut selection = Selection { planners: Vec::new(), left_out: Vec::new() };
    for name in split_list(list) {
        if name != "all" {
            selection.planners.push(parse(&name)?);
            continue;
        }
        for planner in PLANNERS.iter().flat_map(Entry::variants) {
            match planner.plan(input) {
                Ok(_) => selection.planners.push(planner),
                Err(reason) => selection.left_out.push((planner.name(), reason)),
            }
        }
    }
    Ok(selection)
}

/// The planners of a list as [`select`] reads it, each with its options.
#[must_use]
pub fn split_list(list: &str) -> Vec<String> {
    let mut planners: Vec<String> = Vec::new();
    for part in list.split(',') {
        match planners.last_mut() {
            Some(last) if part.contains('=') && !part.contains(':') => {
                last.push(',');
                last.push_str(part);
            }
            _ => planners.push(part.to_owned()),
        }
    }
    planners
}
