//! Root file systems for functions: erofs images made of Debian packages and wheels.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::addition::Addition;
use super::apt::{Suite, clear_status};
use super::disk::sha256;
use super::installed::{held, is_in_status, list_contents};
use super::recipes::{Recipe, recipe, unneeded};
use super::store::{create_folder, remove_tree};
use super::{BuildError, Builder};

/// An image to build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageBuild {
    /// One of firn's own images, by name.
    Own(String),
    /// An image with packages that the caller chooses.
    Custom {
        /// A name for the cache, or a file (a path that contains a `/`).
        out: String,
        /// The image to add to: a name or a file.
        from: String,
        /// Names of Debian packages.
        packages: Vec<String>,
        /// A list of requirements for pip.
        requirements: Option<PathBuf>,
        /// Files and folders of the caller's.
        additions: Vec<Addition>,
    },
}

/// The layer below an image.
#[derive(Debug, Default, Clone)]
struct Below {
    file: Option<PathBuf>,
    /// What distinguishes it from other layers.
    key: String,
}

/// What an image adds to the layer below.
#[derive(Debug, Default)]
struct Contents {
    /// The release of Debian, for an image without a layer below.
    suite: Suite,
    packages: Vec<String>,
    /// Arguments of pip.
    wheels: Vec<String>,
    /// The digest of the list of requirements.
    requirements: String,
    runtime_wheels: Vec<String>,
    runtime_files: &'static [(&'static str, &'static str)],
    java: bool,
    additions: Vec<Addition>,
    /// The keys of the additions.
    added: Vec<String>,
}

impl Contents {
    fn of(recipe: &Recipe) -> Self {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Self {
            suite: recipe.suite,
            packages: owned(recipe.packages),
            wheels: owned(recipe.wheels),
            requirements: String::new(),
            runtime_wheels: owned(recipe.runtime_wheels),
            runtime_files: recipe.runtime_files,
            java: recipe.java,
            ..Self::default()
        }
    }

    /// The key of the image in the cache.
    fn key(&self, below: &Below) -> String {
        let mut lines = vec![below.key.as_str(), "--"];
        lines.extend(self.packages.iter().map(String::as_str));
        lines.push("--");
        lines.extend(self.wheels.iter().map(String::as_str));
        lines.extend([self.requirements.as_str(), "--"]);
        lines.extend(self.runtime_wheels.iter().map(String::as_str));
        lines.push("--");
        unneeded(self.suite).for_each(|name| lines.push(name));
        lines.extend(self.runtime_files.iter().flat_map(|(name, text)| [*name, *text]));
        lines.extend(self.added.iter().map(String::as_str));
        format!("2 {}", sha256(lines.join("\n") + "\n"))
    }
}

/// A root file system in a folder. Its own Python runs with its own loader and libraries.
pub(super) struct Root {
    pub(super) folder: PathBuf,
    suite: Suite,
}

const LIBRARY: &str = "usr/lib/x86_64-linux-gnu";
/// Folders of packages that no function reads.
const UNUSED: [&str; 13] = [
    "usr/include",
    "usr/share/applications",
    "usr/share/bash-completion",
    "usr/share/bug",
    "usr/share/doc",
    "usr/share/doc-base",
    "usr/share/icons",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/share/menu",
    "usr/share/pixmaps",
];
/// The links that update-alternatives would make, in the folder of libraries.
const ALTERNATIVES: [&str; 5] = [
    "blas/libblas.so.3",
    "lapack/liblapack.so.3",
    "openblas-pthread/libblas.so.3",
    "openblas-pthread/liblapack.so.3",
    "openblas-pthread/libopenblas.so.0",
];
const PYTHON_FOLDERS: [&str; 6] = [
    "usr/lib/python3.11",
    "usr/lib/python3.13",
    "usr/lib/python3",
    "usr/local/lib/python3.11",
    "usr/local/lib/python3.13",
    "var/runtime",
];
/// Names the release of Debian in an image of Debian 13.
const RELEASE: &str = "etc/os-release";
const PYTHON: &str = "usr/bin/python3";
pub(super) const RUNTIME: &str = "var/runtime";

impl Builder<'_> {
    /// Builds an image.
    pub(super) fn image(&mut self, image: &ImageBuild) -> Result<(), BuildError> {
        self.shared()?;
        create_folder(&self.store.path("guest"))?;
        match image {
            ImageBuild::Own(name) => self.own_image(name)?,
            ImageBuild::Custom { out, from, packages, requirements, additions } => {
                let added = additions.iter().map(Addition::key).collect::<Result<_, _>>()?;
                let contents = Contents {
                    packages: packages.clone(),
                    additions: additions.clone(),
                    added,
                    ..requirements.as_deref().map_or_else(|| Ok(Contents::default()), required)?
                };
                self.custom_image(out, from, &contents)?;
            }
        }
        self.pack_guest()
    }

    /// Builds one of firn's images, after the layers below it.
    pub(super) fn own_image(&mut self, name: &str) -> Result<(), BuildError> {
        let recipe =
            recipe(name).ok_or_else(|| BuildError::UnknownImage { name: name.to_owned() })?;
        let below = recipe.from.map_or(Ok(Below::default()), |from| self.find_image(from))?;
        self.named_image(name, &below, &Contents::of(&recipe))
    }

    fn custom_image(
        &mut self,
        out: &str,
        from: &str,
        contents: &Contents,
    ) -> Result<(), BuildError> {
        check_place(out)?;
        check_place(from)?;
        let below = self.find_image(from)?;
        if !is_name(out) {
            return self.make_image(Path::new(out), &below, contents);
        }
        if recipe(out).is_some() {
            return Err(BuildError::ReservedName { name: out.to_owned() });
        }
        self.named_image(out, &below, contents)
    }

    /// An image to add to. One of firn's own is built first.
    fn find_image(&mut self, name: &str) -> Result<Below, BuildError> {
        let missing = || BuildError::NoImage { name: name.to_owned() };
        let is_own = recipe(name).is_some();
        if is_own || is_name(name) {
            if is_own {
                self.own_image(name)?;
            }
            let part = place(name);
            let key = self.store.key(&part).ok_or_else(missing)?;
            return Ok(Below { file: Some(self.store.path(part)), key });
        }
        let (size, modified) = size_and_time(Path::new(name)).ok_or_else(missing)?;
        Ok(Below { file: Some(name.into()), key: format!("{name} {size} {modified}") })
    }

    /// Builds an image in the cache, unless it is there with the same contents.
    fn named_image(
        &mut self,
        name: &str,
        below: &Below,
        contents: &Contents,
    ) -> Result<(), BuildError> {
        let part = place(name);
        let key = contents.key(below);
        if self.store.is_built(&part, &key) {
            return Ok(());
        }
        let path = self.store.path(&part);
        if let Some(folder) = path.parent() {
            create_folder(folder)?;
        }
        self.write_image(&path, below, contents)?;
        self.store.publish(&part, &key)
    }

    /// Builds an image in a file of the caller's.
    fn make_image(
        &mut self,
        file: &Path,
        below: &Below,
        contents: &Contents,
    ) -> Result<(), BuildError> {
        self.write_image(file, below, contents)?;
        fs::rename(with_ending(file, ".new"), file).map_err(BuildError::file("write", file))
    }

    /// Writes an image to `file` with the ending `.new`, and the list of its contents.
    fn write_image(
        &mut self,
        file: &Path,
        below: &Below,
        contents: &Contents,
    ) -> Result<(), BuildError> {
        let folder = self.store.fresh_folder("guest/image")?;
        let root = match &below.file {
            Some(below) => self.extract(below, folder)?,
            None => {
                let made = make_skeleton(&folder, contents.suite);
                made.map_err(BuildError::file("write", &folder))?;
                Root { folder, suite: contents.suite }
            }
        };
        if !contents.packages.is_empty() {
            self.add_packages(&root, &contents.packages)?;
        }
        if !contents.runtime_wheels.is_empty() {
            let target = root.folder.join(RUNTIME);
            let arguments = ["--target".to_owned(), target.display().to_string()];
            let arguments: Vec<_> =
                arguments.into_iter().chain(contents.runtime_wheels.clone()).collect();
            self.add_wheels(&root, &arguments)?;
        }
        if !contents.wheels.is_empty() {
            self.add_wheels(&root, &contents.wheels)?;
        }
        for (name, text) in contents.runtime_files {
            let path = root.folder.join(RUNTIME).join(name);
            add_program(&path, text).map_err(BuildError::file("write", &path))?;
        }
        if contents.java {
            self.add_java(&root)?;
        }
        for addition in &contents.additions {
            (self.progress)(&format!("adding {}", addition.source.display()));
            addition.copy_to(&root.folder)?;
        }
        self.compile(&root)?;
        (self.progress)(&format!("making {}", file.display()));
        let new = with_ending(file, ".new");
        // Not compressed: unpacking would take the guest longer than reading.
        let mut command = self.tool("mkfs.erofs")?;
        command.args(["--quiet", "-T0", "--all-root", "-x-1"]).arg(&new).arg(&root.folder);
        if let Err(error) = self.runner.run(&mut command, "Check that there is space for the image")
        {
            // The file may not exist.
            let _ = fs::remove_file(&new);
            return Err(error);
        }
        let list = file.to_string_lossy();
        let list = format!("{}.packages", list.strip_suffix(".erofs").unwrap_or(&list));
        list_contents(&root.folder)
            .and_then(|text| fs::write(&list, text))
            .map_err(BuildError::file("write", &list))?;
        remove_tree(&root.folder)
            .and_then(|()| remove_tree(&self.store.path("guest/image.packages")))
            .map_err(BuildError::file("remove", &root.folder))
    }

    fn extract(&mut self, image: &Path, folder: PathBuf) -> Result<Root, BuildError> {
        let mut command = self.tool("fsck.erofs")?;
        command.arg(format!("--extract={}", folder.display()));
        command.args(["--overwrite", "--no-preserve-owner", "--preserve-perms"]).arg(image);
        self.runner.run(&mut command, "")?;
        let suite = suite_of(&folder).map_err(BuildError::file("read files of", &folder))?;
        Ok(Root { folder, suite })
    }

    /// Unpacks packages, and those of their dependencies that the root does not have. A root file
    /// system needs no maintainer scripts, only the packages' files and a few links that the
    /// scripts would make.
    fn add_packages(&mut self, root: &Root, packages: &[String]) -> Result<(), BuildError> {
        let apt = self.apt(root.suite)?;
        let status = root.folder.join("var/lib/dpkg/status");
        let mut known = fs::read_to_string(&status).map_err(BuildError::file("read", &status))?;
        // Packages that are left out look installed to apt, unless they are requested by name.
        let left_out = unneeded(root.suite).filter(|name| {
            !packages.iter().any(|package| package == name) && !is_in_status(&known, name)
        });
        let mut show = apt.command("apt-cache");
        show.args(["show", "--no-all-versions"]).args(left_out);
        let left_out = held(&self.runner.output(&mut show)?);
        known += &left_out;
        fs::write(apt.status(), known).map_err(BuildError::file("write", apt.status()))?;
        let names: Vec<&str> = packages.iter().map(String::as_str).collect();
        let list = self.store.path("guest/image.packages");
        self.unpack(&apt, &root.folder, &list, |_| true, &names)?;
        clear_status(&apt)?;
        join_certificates(&root.folder).map_err(BuildError::file("write", &root.folder))?;
        remove_unused(&root.folder).map_err(BuildError::file("remove files in", &root.folder))
    }

    /// Installs wheels with the root's Python, so that pip finds the packages' modules.
    fn add_wheels(&mut self, root: &Root, arguments: &[String]) -> Result<(), BuildError> {
        let (part, parts) = match root.suite {
            Suite::Bookworm => ("pip", ["python3-pip", "python3-distutils", "python3-lib2to3"]),
            Suite::Trixie => ("pip-trixie", ["python3-pip", "python3-wheel", "python3-packaging"]),
        };
        if !self.store.is_built(part, "1") {
            let folder = self.store.fresh_folder(part)?;
            let (apt, list) = (self.apt(root.suite)?, self.store.path(format!("{part}.packages")));
            self.unpack(&apt, &folder, &list, |name| parts.contains(&name), &["python3-pip"])?;
            self.store.publish(part, "1")?;
        }
        (self.progress)(&format!("installing wheels: {}", arguments.join(" ")));
        let library = self.store.path(part).join("usr/lib");
        // Debian 12 has distutils beside Python's own modules.
        let path = ["python3/dist-packages", "python3.11"]
            .map(|folder| library.join(folder).display().to_string())
            .join(":");
        let mut command = root.python();
        command.env("PYTHONPATH", path).args(
            "-m pip install --quiet --disable-pip-version-check --no-warn-script-location --root-user-action=ignore \
             --break-system-packages --no-compile --only-binary=:all:"
                .split(' '),
        );
        self.runner
            .run(command.args(arguments), "Check the names, the network and pip's configuration")
    }

    /// Compiles Python's modules. The root is read-only in the guest, so bytecode is made here and
    /// never checked against its source.
    fn compile(&mut self, root: &Root) -> Result<(), BuildError> {
        if !root.folder.join(PYTHON).exists() {
            return Ok(());
        }
        // Without its native part, which may fail to load, the client would fail at the first
        // request.
        if root.folder.join(RUNTIME).join("awslambdaric").is_dir() {
            let mut command = root.python();
            command.env("PYTHONPATH", root.folder.join(RUNTIME));
            command
                .args(["-c", "import runtime_client, awslambdaric.bootstrap, snapshot_restore_py"]);
            self.runner.run(
                &mut command,
                "AWS Lambda's runtime interface client does not load in the guest's root file system",
            )?;
        }
        let mut command = root.python();
        // Python 3.13 would start other processes without the root's loader.
        let jobs = if root.suite == Suite::Trixie { "1" } else { "0" };
        command.args(["-m", "compileall", "-q", "-f", "-j", jobs, "-s"]).arg(&root.folder);
        command.args(["-p", "/", "--invalidation-mode", "unchecked-hash"]);
        let folders = PYTHON_FOLDERS.map(|folder| root.folder.join(folder));
        self.runner.run(command.args(folders.iter().filter(|folder| folder.is_dir())), "")
    }
}

impl Root {
    /// A program of the root.
    pub(super) fn program(&self, path: &str) -> Command {
        let library = self.folder.join(LIBRARY);
        let mut command = Command::new(library.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&library).arg(self.folder.join(path));
        command
    }

    fn python(&self) -> Command {
        let mut command = self.program(PYTHON);
        command.env("PYTHONHOME", self.folder.join("usr")).env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }
}

/// The contents that a list of requirements adds.
fn required(list: &Path) -> Result<Contents, BuildError> {
    let text = fs::read(list).map_err(BuildError::file("read the requirements", list))?;
    Ok(Contents {
        wheels: vec!["-r".to_owned(), list.display().to_string()],
        requirements: sha256(text),
        ..Contents::default()
    })
}

/// The image of that name in the cache.
fn place(name: &str) -> String {
    if name == "base" {
        "guest/root.erofs".to_owned()
    } else {
        format!("guest/images/{name}.erofs")
    }
}

fn is_name(text: &str) -> bool {
    let part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=64).contains(&text.len()) && !text.starts_with('-') && text.chars().all(part)
}

/// Fails for a text that is neither a name nor looks like a file.
fn check_place(text: &str) -> Result<(), BuildError> {
    if is_name(text) || text.contains('/') {
        return Ok(());
    }
    Err(BuildError::Place { place: text.to_owned() })
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

/// Size in bytes and time of modification of a file.
fn size_and_time(path: &Path) -> Option<(u64, i64)> {
    use std::os::unix::fs::MetadataExt;

    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    Some((metadata.size(), metadata.mtime()))
}

/// Folders, and the few files that Debian's base-files and base-passwd make.
fn make_skeleton(root: &Path, suite: Suite) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;

    const FOLDERS: &str = "usr/bin usr/sbin usr/lib usr/lib64 dev etc mnt opt proc root run srv sys tmp var/tmp var/lib/dpkg";
    const FILES: [(&str, &str); 6] = [
        (
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
        ),
        ("etc/group", "root:x:0:\nnogroup:x:65534:\n"),
        ("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
        ("etc/hosts", "127.0.0.1 localhost\n::1 localhost\n"),
        ("etc/hostname", "firn\n"),
        ("var/lib/dpkg/status", ""),
    ];
    for folder in FOLDERS.split(' ') {
        fs::create_dir_all(root.join(folder))?;
    }
    for folder in ["bin", "sbin", "lib", "lib64"] {
        symlink(format!("usr/{folder}"), root.join(folder))?;
    }
    for folder in ["tmp", "var/tmp"] {
        fs::set_permissions(root.join(folder), fs::Permissions::from_mode(0o1777))?;
    }
    FILES.into_iter().try_for_each(|(name, text)| fs::write(root.join(name), text))?;
    match suite {
        Suite::Bookworm => Ok(()),
        Suite::Trixie => {
            let text = "PRETTY_NAME=\"Debian GNU/Linux 13 (trixie)\"\nNAME=\"Debian GNU/Linux\"\nVERSION_ID=\"13\"\n\
                        VERSION_CODENAME=trixie\nID=debian\n";
            fs::write(root.join(RELEASE), text)
        }
    }
}

/// The release of Debian that a root's packages are from.
fn suite_of(root: &Path) -> io::Result<Suite> {
    match fs::read_to_string(root.join(RELEASE)) {
        Ok(text) if text.contains("VERSION_CODENAME=trixie\n") => Ok(Suite::Trixie),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(Suite::Bookworm),
    }
}

/// Makes the file of all certificates that update-ca-certificates would make, if the root has any.
fn join_certificates(root: &Path) -> io::Result<()> {
    let entries = match fs::read_dir(root.join("usr/share/ca-certificates/mozilla")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
    files.sort();
    let mut all = String::new();
    for file in files {
        all += &fs::read_to_string(file)?;
    }
    let folder = root.join("etc/ssl/certs");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("ca-certificates.crt"), all)
}

/// Removes what no function reads, and makes the links of update-alternatives.
fn remove_unused(root: &Path) -> io::Result<()> {
    for folder in UNUSED {
        remove_tree(&root.join(folder))?;
    }
    remove_matching(&root.join("usr/lib"), &|path, folder| {
        !folder && path.extension().is_some_and(|end| end == "a")
    })?;
    remove_matching(&root.join("usr/lib/python3/dist-packages"), &|path, folder| {
        folder && path.file_name().is_some_and(|name| name == "tests")
    })?;
    let library = root.join(LIBRARY);
    for target in ALTERNATIVES.into_iter().filter(|target| library.join(target).exists()) {
        let link = library.join(Path::new(target).file_name().unwrap_or_default());
        remove_tree(&link)?;
        symlink(target, link)?;
    }
    Ok(())
}

/// Removes the files and folders below `folder` that `selects` accepts. It gets a path, and whether
/// it is a folder.
fn remove_matching(folder: &Path, selects: &dyn Fn(&Path, bool) -> bool) -> io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let (path, kind) = (entry.path(), entry.file_type()?);
        if selects(&path, kind.is_dir()) {
            remove_tree(&path)?;
        } else if kind.is_dir() {
            remove_matching(&path, selects)?;
        }
    }
    Ok(())
}

/// Writes a program, or a script that it reads.
fn add_program(path: &Path, text: &str) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;

    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(path, text)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755))
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
