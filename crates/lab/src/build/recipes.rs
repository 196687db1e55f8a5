//! The contents of firn's own images.

use super::apt::Suite;

/// The names of firn's own images, for an error's text.
pub(super) const IMAGES: &str =
    "base, aws, python3.13, java21, nodejs20.x, science, learning and media";

/// What Maven fetches for the runtime of Java, with the versions.
pub(super) const POM: &str = include_str!("../../../../guest/runtimes/java/pom.xml");

/// An image: the release of Debian, its layer below, Debian packages, and wheels that pip installs.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) struct Recipe {
    /// The image that it adds to, by name.
    pub(super) from: Option<&'static str>,
    /// The release of an image without a layer below.
    pub(super) suite: Suite,
    pub(super) packages: &'static [&'static str],
    /// Arguments of pip.
    pub(super) wheels: &'static [&'static str],
    /// Wheels in `/var/runtime`, where AWS Lambda has its runtime.
    pub(super) runtime_wheels: &'static [&'static str],
    /// Files in `/var/runtime`: names and contents.
    pub(super) runtime_files: &'static [(&'static str, &'static str)],
    /// Whether AWS Lambda's runtime interface client for Java is there.
    pub(super) java: bool,
}

/// The recipe of one of firn's images.
pub(super) fn recipe(name: &str) -> Option<Recipe> {
    let recipe = match name {
        "base" => Recipe {
            // The runtime interface client is linked with libstdc++6, which a wheel cannot depend
            // on.
            packages: &[
                "python3",
                "python3-pyaes",
                "python3-chameleon",
                "python3-jinja2",
                "libstdc++6",
            ],
            // AWS Lambda's runtime interface client, and the library for its SnapStart hooks.
            runtime_wheels: &["awslambdaric", "snapshot-restore-py"],
            ..Recipe::default()
        },
        // What functions find in AWS Lambda's Python runtimes.
        "aws" => Recipe {
            from: Some("base"),
            packages: &["coreutils", "dash", "tzdata", "ca-certificates", "openssl"],
            wheels: &["boto3"],
            ..Recipe::default()
        },
        "python3.13" => Recipe {
            suite: Suite::Trixie,
            packages: &[
                "python3",
                "libstdc++6",
                "coreutils",
                "dash",
                "tzdata",
                "ca-certificates",
                "openssl",
            ],
            wheels: &["boto3==1.44.8"],
            runtime_wheels: &["awslambdaric==4.2.2", "snapshot-restore-py==1.0.0"],
            ..Recipe::default()
        },
        "nodejs20.x" => Recipe {
            suite: Suite::Trixie,
            packages: &["nodejs", "coreutils", "dash", "tzdata", "ca-certificates", "openssl"],
            runtime_files: &[
                ("bootstrap", include_str!("../../../../guest/runtimes/nodejs/bootstrap")),
                ("index.mjs", include_str!("../../../../guest/runtimes/nodejs/index.mjs")),
            ],
            ..Recipe::default()
        },
        "java21" => Recipe {
            suite: Suite::Trixie,
            packages: &[
                "openjdk-21-jre-headless",
                "coreutils",
                "dash",
                "tzdata",
                "ca-certificates",
                "openssl",
            ],
            runtime_files: &[
                ("bootstrap", include_str!("../../../../guest/runtimes/java/bootstrap")),
                ("Start.java", include_str!("../../../../guest/runtimes/java/Start.java")),
                ("jvm.flags", include_str!("../../../../guest/runtimes/java/jvm.flags")),
                ("pom.xml", POM),
            ],
            java: true,
            ..Recipe::default()
        },
        "science" => Recipe {
            from: Some("base"),
            packages: &["python3-numpy", "python3-pil", "python3-igraph", "libopenblas0-pthread"],
            ..Recipe::default()
        },
        "learning" => Recipe {
            from: Some("science"),
            packages: &["python3-torch", "python3-torchvision", "python3-sklearn"],
            ..Recipe::default()
        },
        "media" => Recipe {
            from: Some("science"),
            packages: &["ffmpeg"],
            // Debian's OpenCV depends on VTK, GDAL and Qt: 700 MB more. This is the last version
            // for Debian's numpy.
            wheels: &["opencv-python-headless==4.8.1.78"],
            ..Recipe::default()
        },
        _ => return None,
    };
    Some(recipe)
}

/// Packages that no function uses although others depend on them, in a release of Debian.
pub(super) fn unneeded(suite: Suite) -> impl Iterator<Item = &'static str> {
    let more = if suite == Suite::Trixie { UNNEEDED_13.as_slice() } else { &[] };
    UNNEEDED.iter().chain(more).copied()
}

/// Those of Debian 13 alone.
const UNNEEDED_13: [&str; 4] =
    ["ca-certificates-java", "java-common", "node-corepack", "util-linux"];

/// Packages that no function uses although others depend on them: package managers, and programs
/// for users and desktops. apt is configured as if they were installed. Programs are linked with
/// none of them, except drivers for graphics cards, which are loaded only where there is a card.
const UNNEEDED: [&str; 33] = [
    "adduser",
    "ca-certificates",
    "debconf",
    "dpkg",
    "fontconfig-config",
    "iso-codes",
    "lsb-base",
    "mailcap",
    "mime-support",
    "openssl",
    "passwd",
    "perl",
    "perl-base",
    "procps",
    "shared-mime-info",
    "sysvinit-utils",
    "tar",
    "ucf",
    "gdal-data",
    "gdal-plugins",
    "libgl1-mesa-dri",
    "libllvm15",
    "libwacom-common",
    "mariadb-common",
    "mysql-common",
    "proj-data",
    "x11-common",
    "xkb-data",
    "libtorch-test",
    "python3-hypothesis",
    "python3-lib2to3",
    "python3-pythran",
    "python3-sympy",
];
