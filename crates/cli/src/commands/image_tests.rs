use clap::Parser;

use super::{BuildArgs, ImageBuild};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    build: BuildArgs,
}

fn parsed(line: &str) -> Result<ImageBuild, clap::error::ErrorKind> {
    let line = Line::try_parse_from(line.split(' ')).map_err(|error| error.kind())?;
    Ok(ImageBuild::from(&line.build))
}

fn custom(out: &str, from: &str, packages: &[&str], requirements: Option<&str>) -> ImageBuild {
    ImageBuild::Custom {
        out: out.to_owned(),
        from: from.to_owned(),
        packages: packages.iter().map(|&package| package.to_owned()).collect(),
        requirements: requirements.map(Into::into),
        additions: Vec::new(),
    }
}

#[test]
fn arguments_describe_the_image() {
    assert_eq!(parsed("build science").unwrap(), ImageBuild::Own("science".to_owned()));
    assert_eq!(parsed("build --out mine").unwrap(), custom("mine", "base", &[], None));
    let line =
        "build --out ./a.erofs --from science --packages a,b --packages c --requirements r.txt";
    let image = custom("./a.erofs", "science", &["a", "b", "c"], Some("r.txt"));
    assert_eq!(parsed(line).unwrap(), image);
    let ImageBuild::Custom { additions, .. } =
        parsed("build --out mine --add a/net.bin --add labels:/srv/labels").unwrap()
    else {
        panic!("not a custom image")
    };
    let places: Vec<_> = additions.iter().map(|addition| addition.place.to_str()).collect();
    assert_eq!(places, [Some("opt/net.bin"), Some("srv/labels")]);
}

#[test]
fn own_and_custom_images_exclude_each_other() {
    use clap::error::ErrorKind::{ArgumentConflict, MissingRequiredArgument};
    assert_eq!(parsed("build --packages a").unwrap_err(), MissingRequiredArgument);
    for option in ["--out mine", "--packages a", "--requirements r", "--from science", "--add a"] {
        let line = format!("build base {option}");
        assert_eq!(parsed(&line).unwrap_err(), ArgumentConflict, "{line}");
    }
}
