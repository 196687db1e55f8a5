//! `firn image`: the root file systems that functions run on.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use thiserror::Error;

use firn_lab::{Addition, BuildError, ImageBuild, guest_file};

use crate::assets;
use crate::commands::lab;
use crate::output;

/// Commands of `firn image`.
#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    /// Build an image into firn's cache, or into a file
    #[command(after_help = "\
An image is a root file system for functions, in the format that microVMs boot from (erofs). It contains the layer below
it (--from), Debian packages with their dependencies, the wheels that pip installs for a list of requirements, and files
of your own (--add). The build requires a Debian system and works without root. firn's own images are base, aws (boto3,
certificates, time zones, a shell and coreutils), python3.13, java21 and nodejs20.x (those runtimes, on Debian 13),
science (numpy, igraph, PIL), learning (science with torch, torchvision, scikit-learn) and media (science with ffmpeg
and OpenCV).

Examples:
  firn image build learning
  firn image build --packages python3-yaml --requirements requirements.txt --out mine
  firn image build --from science --packages python3-scipy --out ./scipy.erofs
  firn image build --from learning --add resnet50.pt --add labels:/usr/share/labels --out models
  firn boot --image mine my-function.py")]
    Build(BuildArgs),
    /// List the images in firn's cache
    List,
}

/// Arguments of `firn image build`.
#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// One of firn's own images: base, aws, python3.13, java21,
    /// nodejs20.x, science, learning, media
    #[arg(value_name = "NAME", required_unless_present = "out", conflicts_with = "out")]
    name: Option<String>,
    /// Output of a custom image: a name (a-z, 0-9 and -) for the cache, or a file (a path with a /)
    #[arg(long, value_name = "NAME|FILE")]
    out: Option<String>,
    /// The image to add to
    #[arg(long, value_name = "NAME|FILE", default_value = "base", conflicts_with = "name")]
    from: String,
    /// Debian packages, separated by commas
    #[arg(long, value_name = "A,B", value_delimiter = ',', conflicts_with = "name")]
    packages: Vec<String>,
    /// A list of requirements for pip
    #[arg(long, value_name = "FILE", conflicts_with = "name")]
    requirements: Option<PathBuf>,
    /// Add a file or folder of any size, at /opt/NAME or at a place of its own; can be repeated
    #[arg(long, value_name = "PATH[:/PLACE]", conflicts_with = "name")]
    add: Vec<Addition>,
}

/// A command of `firn image` failed.
#[derive(Debug, Error)]
pub(crate) enum ImageCommandError {
    /// The build failed.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The cache cannot be listed.
    #[error("cannot list the images in {}", .path.display())]
    List {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

pub(crate) fn run(command: &ImageCommand) -> Result<ExitCode, ImageCommandError> {
    match command {
        ImageCommand::Build(arguments) => {
            firn_lab::build_image(&arguments.into(), &lab::progress)?;
        }
        ImageCommand::List => {
            let failed = |source| ImageCommandError::List { path: guest_file("images"), source };
            for (name, path) in assets::images().map_err(failed)? {
                output::line(&format!("{:16} {}", name.as_str(), path.display()));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

impl From<&BuildArgs> for ImageBuild {
    fn from(arguments: &BuildArgs) -> Self {
        let BuildArgs { name, out, from, packages, requirements, add } = arguments;
        match (name, out) {
            (Some(name), _) => Self::Own(name.clone()),
            (None, out) => Self::Custom {
                out: out.clone().unwrap_or_default(),
                from: from.clone(),
                packages: packages.clone(),
                requirements: requirements.clone(),
                additions: add.clone(),
            },
        }
    }
}

#[cfg(test)]
#[path = "image_tests.rs"]
mod tests;
