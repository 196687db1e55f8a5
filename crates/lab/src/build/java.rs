//! AWS Lambda's runtime interface client for Java, in a root file system with Debian's JDK.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::apt::Suite;
use super::disk::sha256;
use super::image::{RUNTIME, Root};
use super::recipes::POM;
use super::store::create_folder;
use super::{BuildError, Builder};

const COPY: &str = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies";
const JDK: &str = "usr/lib/jvm/java-21-openjdk-amd64";
/// What Debian's JDK reads certificates from.
const STORE: &str = "etc/ssl/certs/java/cacerts";
const CERTIFICATES: &str = "etc/ssl/certs/ca-certificates.crt";
/// Maven's settings for all users of this system.
const SETTINGS: &str = "/etc/maven/settings.xml";

impl Builder<'_> {
    /// Adds the client's jars to a root, and compiles the class that starts the client with the
    /// root's own JDK.
    pub(super) fn add_java(&mut self, root: &Root) -> Result<(), BuildError> {
        let jvm = root.folder.join("usr/lib/jvm");
        make_links_relative(&jvm, &root.folder).map_err(BuildError::file("link in", &jvm))?;
        let certificates = root.folder.join(CERTIFICATES);
        self.trust_store(root, &certificates, &root.folder.join(STORE))?;
        self.fetch_jars(root)?;
        let runtime = root.folder.join(RUNTIME);
        let library = runtime.join("lib");
        create_folder(&library)?;
        let jars = copy_files(&self.store.path("java21"), &library);
        let jars = jars.map_err(BuildError::file("copy to", &library))?;
        (self.progress)("compiling what starts the runtime of Java");
        let mut command = java(root);
        command.args(["-m", "jdk.compiler/com.sun.tools.javac.Main", "-cp", &jars.join(":")]);
        command.arg("-d").arg(&runtime).arg(runtime.join("Start.java"));
        self.runner.run(&mut command, "")
    }

    /// Makes the file of certificates that Java reads from one that other programs read.
    fn trust_store(
        &mut self,
        root: &Root,
        certificates: &Path,
        store: &Path,
    ) -> Result<(), BuildError> {
        store.parent().map_or(Ok(()), create_folder)?;
        let mut command = root.program("usr/bin/openssl");
        command.env("OPENSSL_CONF", "/dev/null");
        command.args(["pkcs12", "-export", "-nokeys", "-jdktrust", "anyExtendedKeyUsage"]);
        // Java opens it without a password.
        command.args(["-passout", "pass:", "-certpbe", "NONE", "-nomac"]);
        command.arg("-in").arg(certificates).arg("-out").arg(store);
        self.runner.run(&mut command, "")?;
        // openssl makes a private file.
        fs::set_permissions(store, fs::Permissions::from_mode(0o644))
            .map_err(BuildError::file("write", store))
    }

    /// Fetches the client's jars with Debian's Maven, which the root's JDK runs.
    fn fetch_jars(&mut self, root: &Root) -> Result<(), BuildError> {
        let key = format!("1 {}", sha256(POM));
        if self.store.is_built("java21", &key) {
            return Ok(());
        }
        let maven = self.store.fresh_folder("maven")?;
        let (apt, list) = (self.apt(Suite::Trixie)?, maven.join("packages"));
        let is_maven = |name: &str| name == "maven" || name.ends_with("-java");
        self.unpack(&apt, &maven, &list, is_maven, &["maven"])?;
        let jars = self.store.fresh_folder("java21")?;
        let home = maven.join("usr/share/maven");
        (self.progress)("fetching AWS Lambda's runtime interface client for Java");
        let mut command = java(root);
        // This system's certificates, and not the root's, are those of its registry.
        let system = Path::new("/").join(CERTIFICATES);
        if system.is_file() {
            let store = maven.join("cacerts");
            self.trust_store(root, &system, &store)?;
            command.arg(format!("-Djavax.net.ssl.trustStore={}", store.display()));
        }
        command.arg(format!("-Dmaven.home={}", home.display()));
        command.arg(format!("-Dmaven.multiModuleProjectDirectory={}", maven.display()));
        command.arg(format!("-Dclassworlds.conf={}", maven.join("etc/maven/m2.conf").display()));
        command.arg("-cp").arg(home.join("boot/plexus-classworlds-2.x.jar"));
        command.arg("org.codehaus.plexus.classworlds.launcher.Launcher");
        if Path::new(SETTINGS).is_file() {
            command.args(["--global-settings", SETTINGS]);
        }
        command.args(["--quiet", "--batch-mode", "--strict-checksums", "--file"]);
        command.arg(root.folder.join(RUNTIME).join("pom.xml"));
        command.args([COPY, "-DincludeScope=runtime"]);
        command.arg(format!("-DoutputDirectory={}", jars.display()));
        self.runner.run(&mut command, "Check the network and Maven's configuration")?;
        self.store.publish("java21", &key)
    }
}

fn java(root: &Root) -> Command {
    root.program(&format!("{JDK}/bin/java"))
}

/// Makes the absolute links below `folder` relative, so that they name files of `root` from
/// outside, too.
fn make_links_relative(folder: &Path, root: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let (path, kind) = entry.and_then(|entry| Ok((entry.path(), entry.file_type()?)))?;
        if kind.is_dir() {
            make_links_relative(&path, root)?;
        } else if kind.is_symlink() {
            let target = fs::read_link(&path)?;
            let Ok(target) = target.strip_prefix("/") else { continue };
            let depth = folder.strip_prefix(root).map_err(io::Error::other)?.components().count();
            fs::remove_file(&path)?;
            symlink(PathBuf::from("../".repeat(depth)).join(target), &path)?;
        }
    }
    Ok(())
}

/// Copies the files of a folder, and returns the paths of the copies.
fn copy_files(from: &Path, to: &Path) -> io::Result<Vec<String>> {
    let copy = |entry: io::Result<fs::DirEntry>| {
        let entry = entry?;
        let copy = to.join(entry.file_name());
        fs::copy(entry.path(), &copy)?;
        Ok(copy.display().to_string())
    };
    fs::read_dir(from)?.map(copy).collect()
}

#[cfg(test)]
#[path = "java_tests.rs"]
mod tests;
