//! Debian packages, resolved and downloaded by an apt with sources, state and cache of its own.
//!
//! Its dpkg status is empty, so that it resolves all dependencies of what is installed.

use std::fmt::Write;
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::command::Runner;
use super::store::{create_folder, remove_tree};
use super::{BuildError, Builder};

/// A release of Debian.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Suite {
    /// Debian 12, whose mirrors the system's apt names.
    #[default]
    Bookworm,
    /// Debian 13, from the same mirrors.
    Trixie,
}

impl Suite {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
        }
    }

    /// The folder of its apt in the cache.
    fn folder(self) -> &'static str {
        match self {
            Self::Bookworm => "apt",
            Self::Trixie => "apt/trixie",
        }
    }
}

/// Debian 12's suite with newer packages.
pub(super) const BACKPORTS: &str = "bookworm-backports";

const KEYS: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// Fields of `apt-get indextargets`.
const TARGET_FORMAT: &str =
    "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ARCHITECTURE)|$(CREATED_BY)|$(FILENAME)";

/// The private apt.
#[derive(Debug, Clone)]
pub(super) struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// A command of apt's. Its temporary files are in the cache, where the next build removes those
    /// of an interrupted one.
    pub(super) fn command(&self, name: &str) -> Command {
        let mut command = Command::new(name);
        command.env("TMPDIR", self.folder.join("tmp")).arg("-c").arg(self.folder.join("apt.conf"));
        command
    }

    /// The dpkg status that packages are resolved against.
    pub(super) fn status(&self) -> PathBuf {
        self.folder.join("status")
    }

    fn archives(&self) -> PathBuf {
        self.folder.join("archives")
    }

    fn write(&self, name: &str, text: &str) -> Result<(), BuildError> {
        let path = self.folder.join(name);
        fs::write(&path, text).map_err(BuildError::file("write", &path))
    }

    /// Reads the package lists of `suite` from the system's own Debian mirror: those of Debian 12
    /// with the backports suite of the same mirror, those of Debian 13 in their place.
    ///
    /// The Release files name the sources that are Debian's. They are read into separate lists,
    /// because the system's lists may be empty, and other repositories use the names of Debian's
    /// suites.
    fn set_up(folder: PathBuf, suite: Suite, runner: &mut Runner) -> Result<Self, BuildError> {
        for part in ["tmp", "lists", "sources"] {
            let part = folder.join(part);
            remove_tree(&part).map_err(BuildError::file("remove", &part))?;
        }
        for part in
            ["tmp", "lists/partial", "sources/partial", "archives/partial", "etc/preferences.d"]
        {
            create_folder(&folder.join(part))?;
        }
        let apt = Self { folder };
        apt.write("status", "")?;
        let base = configuration(&apt.folder);
        apt.write("apt.conf", &base)?;
        let mut update = apt.command("apt-get");
        update.args(["-qq", "-o", "Acquire::IndexTargets::deb::Packages::DefaultEnabled=false"]);
        match runner.run(update.arg("update"), "") {
            // A repository of others may be unreachable. A missing Debian mirror is an error below.
            Ok(()) | Err(BuildError::Program { .. }) => {}
            Err(error) => return Err(error),
        }
        let mut targets = apt.command("apt-get");
        targets.args(["--no-release-info", "indextargets", "--format", TARGET_FORMAT]);
        let sources = debian_sources(&runner.output(&mut targets)?, suite, is_debian);
        if !sources.contains(&format!(" {} ", suite.name())) {
            return Err(BuildError::NoMirror { suite: Suite::Bookworm.name() });
        }
        apt.write("etc/sources.list", &sources)?;
        apt.write("apt.conf", &(base + &private_sources(&apt.folder)))?;
        let hint = "Check the network and /etc/apt";
        runner.run(apt.command("apt-get").args(["-qq", "update"]), hint)?;
        Ok(apt)
    }
}

impl Builder<'_> {
    /// The private apt of a suite. Its package lists are read once in a build.
    pub(super) fn apt(&mut self, suite: Suite) -> Result<Apt, BuildError> {
        if let Some(apt) = self.apts.get(&suite) {
            return Ok(apt.clone());
        }
        (self.progress)(&format!("reading the package lists of {}", suite.name()));
        let apt = Apt::set_up(self.store.path(suite.folder()), suite, &mut self.runner)?;
        self.apts.insert(suite, apt.clone());
        Ok(apt)
    }

    /// Resolves what `arguments` of `apt` install, and unpacks those of the packages that `selects`
    /// accepts by name into `folder`.
    ///
    /// Their names and versions are listed in the file `list`. Their descriptions are added to the
    /// dpkg status in `folder`, if it has one.
    pub(super) fn unpack(
        &mut self,
        apt: &Apt,
        folder: &Path,
        list: &Path,
        selects: impl Fn(&str) -> bool,
        arguments: &[&str],
    ) -> Result<(), BuildError> {
        let mut simulate = apt.command("apt-get");
        simulate.args(["-qq", "--simulate", "install"]).args(arguments);
        let packages = || arguments.join(" ");
        let plan = match self.runner.output(&mut simulate) {
            Err(BuildError::Program { .. }) => String::new(),
            output => output?,
        };
        let plan: Vec<_> = installed(&plan).filter(|(name, _)| selects(name)).collect();
        if plan.is_empty() {
            return Err(BuildError::Resolve { packages: packages() });
        }
        (self.progress)(&format!("downloading {} packages for: {}", plan.len(), packages()));
        let mut download = apt.command("apt-get");
        download.current_dir(apt.archives()).args(["-qq", "download"]);
        download.args(plan.iter().map(|(name, version)| format!("{name}={version}")));
        self.runner.run(&mut download, "Check the network and /etc/apt")?;
        let mut listed = String::new();
        for (name, version) in plan {
            self.unpack_package(apt, folder, name, version)?;
            listed += &format!("{name} {version}\n");
        }
        fs::write(list, listed).map_err(BuildError::file("write", list))
    }

    fn unpack_package(
        &mut self,
        apt: &Apt,
        folder: &Path,
        name: &str,
        version: &str,
    ) -> Result<(), BuildError> {
        let stem = format!("{name}_{}", version.replace(':', "%3a"));
        let files = ["amd64", "all"].map(|end| apt.archives().join(format!("{stem}_{end}.deb")));
        let Some(file) = files.iter().find(|file| file.is_file()) else {
            let package = format!("{name} {version}");
            return Err(BuildError::NotDownloaded { package, folder: apt.archives() });
        };
        let mut tar = Command::new("tar");
        tar.arg("-x").arg("-C").arg(folder).args(["--keep-directory-symlink", "--no-same-owner"]);
        self.runner.pipe(Command::new("dpkg-deb").arg("--fsys-tarfile").arg(file), &mut tar)?;
        let status = folder.join("var/lib/dpkg/status");
        if status.is_file() {
            let fields = self.runner.output(Command::new("dpkg-deb").arg("--field").arg(file))?;
            let appended = OpenOptions::new().append(true).open(&status).and_then(|mut status| {
                status.write_all(format!("{fields}Status: install ok installed\n\n").as_bytes())
            });
            appended.map_err(BuildError::file("write", &status))?;
        }
        fs::remove_file(file).map_err(BuildError::file("remove", file))
    }
}

/// Names and versions of the packages that a simulation installs. An upgrade, which names the old
/// version first, is not among them.
fn installed(simulation: &str) -> impl Iterator<Item = (&str, &str)> {
    simulation.lines().filter_map(|line| {
        let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
        let (version, _) = rest.split_once(' ')?;
        (!name.contains(' ')).then_some((name, version))
    })
}

/// The lines of a list of sources: a suite from each mirror of Debian 12 among the `targets`, its
/// updates, and Debian 12's backports. `is_debian` gets the path of a source's files without their
/// endings.
fn debian_sources(targets: &str, suite: Suite, is_debian: impl Fn(&str) -> bool) -> String {
    let options =
        if Path::new(KEYS).is_file() { format!("[signed-by={KEYS}] ") } else { String::new() };
    let mut sources = String::new();
    for line in targets.lines() {
        let fields: Vec<&str> = line.splitn(6, '|').collect();
        let [uri, release, "main", "amd64", "Packages", file] = fields.as_slice() else { continue };
        let stem = file.strip_suffix("_main_binary-amd64_Packages").unwrap_or(file);
        if !is_debian(stem) {
            continue;
        }
        let mut add = |suite: &str| {
            // Writing to a string does not fail.
            let _ = writeln!(sources, "deb {options}{uri} {suite} main");
        };
        let part = release.strip_prefix(Suite::Bookworm.name());
        if let Some(part @ ("" | "-updates" | "-security" | "/updates")) = part {
            add(&format!("{}{part}", suite.name()));
        }
        if part == Some("") && suite == Suite::Bookworm {
            add(BACKPORTS);
        }
    }
    sources
}

/// Whether the Release file of a source names Debian as its origin.
fn is_debian(stem: &str) -> bool {
    ["InRelease", "Release"].iter().any(|end| {
        let text = fs::read_to_string(format!("{stem}_{end}")).unwrap_or_default();
        text.lines().any(|line| line == "Origin: Debian")
    })
}

fn configuration(folder: &Path) -> String {
    let folder = folder.display();
    let targets = ["DEP-11", "DEP-11-icons-small", "DEP-11-icons", "DEP-11-icons-hidpi"]
        .map(|target| format!("Acquire::IndexTargets::deb::{target}::DefaultEnabled \"false\";\n"))
        .concat();
    format!(
        r#"#clear APT::Update;
#clear DPkg;
APT::Architecture "amd64";
APT::Architectures {{ "amd64"; }};
APT::Get::Assume-Yes "true";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
{targets}Dir::State "{folder}";
Dir::State::extended_states "{folder}/extended_states";
Dir::State::lists "{folder}/sources";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}";
Dir::Cache::archives "{folder}/archives";
Dir::Cache::pkgcache "{folder}/pkgcache.bin";
Dir::Cache::srcpkgcache "";
Dir::Log "{folder}/log";
"#
    )
}

fn private_sources(folder: &Path) -> String {
    let folder = folder.display();
    format!(
        r#"APT::Update::Error-Mode "any";
Dir::Etc::preferences "-";
Dir::Etc::preferencesparts "{folder}/etc/preferences.d";
Dir::Etc::sourcelist "{folder}/etc/sources.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "{folder}/lists";
"#
    )
}

/// Empties the dpkg status that packages are resolved against.
pub(super) fn clear_status(apt: &Apt) -> Result<(), BuildError> {
    let status = apt.status();
    File::create(&status).map(drop).map_err(BuildError::file("write", status))
}

#[cfg(test)]
#[path = "apt_tests.rs"]
mod tests;
