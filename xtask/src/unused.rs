//! Finds dependencies that a crate declares and does not use.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Result;
use crate::context::Context;
use crate::step::Step;

/// Lists every unused dependency of the workspace as an error.
pub(crate) fn check(context: &Context) -> Result<()> {
    let metadata = Step::words("cargo metadata --no-deps --format-version 1");
    if context.runner.is_dry() {
        return context.runner.run(&metadata);
    }
    let metadata: Value = serde_json::from_str(&metadata.output()?)?;
    let mut used = BTreeSet::new();
    let mut findings = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let name = package["name"].as_str().unwrap_or_default();
        let sources = Sources::read(package)?;
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let dependency = Dependency::of(dependency);
            let problem = sources.problem(&dependency);
            findings
                .extend(problem.map(|problem| format!("{name}: {} {problem}", dependency.name)));
            used.insert(dependency.name);
        }
    }
    let manifest = fs::read_to_string(context.paths.root.join("Cargo.toml"))?;
    let unused = workspace_dependencies(&manifest).filter(|name| !used.contains(*name));
    findings.extend(unused.map(|name| format!("Cargo.toml: no crate uses {name}")));
    if findings.is_empty() {
        return Ok(());
    }
    Err(format!("unused dependencies:\n{}", findings.join("\n")).into())
}

/// A dependency as a crate declares it.
struct Dependency {
    name: String,
    /// The crate's name in source code.
    identifier: String,
    dev: bool,
}

impl Dependency {
    fn of(dependency: &Value) -> Self {
        let name = dependency["name"].as_str().unwrap_or_default();
        Self {
            identifier: dependency["rename"].as_str().unwrap_or(name).replace('-', "_"),
            name: name.to_owned(),
            dev: dependency["kind"] == "dev",
        }
    }
}

/// The source text of a crate.
#[derive(Default)]
struct Sources {
    production: String,
    tests: String,
}

impl Sources {
    fn read(package: &Value) -> Result<Self> {
        let mut sources = Self::default();
        let manifest = PathBuf::from(package["manifest_path"].as_str().unwrap_or_default());
        let package_folder = manifest.parent().unwrap_or(Path::new("/"));
        let mut roots: BTreeSet<PathBuf> = BTreeSet::new();
        for target in package["targets"].as_array().into_iter().flatten() {
            let path = PathBuf::from(target["src_path"].as_str().unwrap_or_default());
            // A build script lies beside the manifest, and its folder holds more than its sources.
            if target["kind"][0] == "custom-build" {
                sources.production += &fs::read_to_string(path)?;
            } else {
                roots.extend(path.parent().map(Path::to_owned));
            }
        }
        let roots: Vec<_> = roots
            .iter()
            .filter(|root| !root.ancestors().skip(1).any(|folder| roots.contains(folder)))
            .collect();
        for root in roots {
            sources.read_folder(package_folder, root)?;
        }
        Ok(sources)
    }

    fn read_folder(&mut self, package: &Path, folder: &Path) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                self.read_folder(package, &path)?;
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = fs::read_to_string(&path)?;
                let name = path.strip_prefix(package).unwrap_or(&path).to_string_lossy();
                let test = is_test(&name);
                let sources = if test { &mut self.tests } else { &mut self.production };
                sources.push_str(&text);
            }
        }
        Ok(())
    }

    fn problem(&self, dependency: &Dependency) -> Option<&'static str> {
        let production = contains_word(&self.production, &dependency.identifier);
        let tests = contains_word(&self.tests, &dependency.identifier);
        match (dependency.dev, production, tests) {
            (false, false, true) => Some("is used only in tests: make it a dev-dependency"),
            (_, false, false) => Some("is not used"),
            _ => None,
        }
    }
}

/// Whether a file holds tests or benchmarks, by its path in its package or in the repository.
pub(crate) fn is_test(path: &str) -> bool {
    path.ends_with("_tests.rs")
        || path.split('/').any(|part| ["tests.rs", "tests", "benches"].contains(&part))
}

/// The names in the section `[workspace.dependencies]`.
fn workspace_dependencies(manifest: &str) -> impl Iterator<Item = &str> {
    manifest
        .lines()
        .skip_while(|line| *line != "[workspace.dependencies]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .filter_map(|line| Some(line.split_once('=')?.0.trim()))
        .filter(|name| !name.starts_with('#'))
}

fn contains_word(text: &str, word: &str) -> bool {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    text.match_indices(word).any(|(start, _)| {
        !part(text[..start].chars().next_back()) && !part(text[start + word.len()..].chars().next())
    })
}

#[cfg(test)]
#[path = "unused_tests.rs"]
mod tests;
