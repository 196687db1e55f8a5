use clap::Parser;

use super::RunArgs;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    run: RunArgs,
}

fn memory(text: &str) -> Result<u64, String> {
    let line = Line::try_parse_from(["run", "--memory", text, "--", "true"]);
    line.map(|line| line.run.memory).map_err(|error| error.to_string())
}

#[test]
fn sizes_are_those_of_all_commands() {
    for text in ["6G", "6GiB", "6gb", "6144M", "6442450944"] {
        assert_eq!(memory(text), Ok(6144), "{text}");
    }
    for text in ["6", "511M", "65G", "512M1", "1048577K", "6 G"] {
        let error = memory(text).unwrap_err();
        assert!(error.contains("--memory <SIZE>"), "{text}: {error}");
    }
    assert!(memory("6").unwrap_err().contains("from 512.0 MiB to 64.0 GiB, such as 2G"));
}
