use clap::Parser;

use super::{BuildArgs, words};

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    build: BuildArgs,
}

fn parsed(line: &str) -> Result<Vec<String>, clap::error::ErrorKind> {
    let line = Line::try_parse_from(line.split(' ')).map_err(|error| error.kind())?;
    Ok(words(&line.build))
}

#[test]
fn the_script_gets_what_was_asked_for() {
    assert_eq!(parsed("build science").unwrap(), ["science"]);
    assert_eq!(parsed("build --out mine").unwrap(), ["--out", "mine", "--from", "base"]);
    let line =
        "build --out ./a.erofs --from science --packages a,b --packages c --requirements r.txt";
    let asked = "--out ./a.erofs --from science --packages a,b,c --requirements r.txt";
    assert_eq!(parsed(line).unwrap().join(" "), asked);
}

#[test]
fn an_image_is_one_of_firns_or_ones_own() {
    use clap::error::ErrorKind::{ArgumentConflict, MissingRequiredArgument};
    assert_eq!(parsed("build --packages a").unwrap_err(), MissingRequiredArgument);
    for option in ["--out mine", "--packages a", "--requirements r", "--from science"] {
        let line = format!("build base {option}");
        assert_eq!(parsed(&line).unwrap_err(), ArgumentConflict, "{line}");
    }
}
