//! The result of a command.

use serde_json::Value;

/// A command that has exited.
#[derive(Debug)]
pub struct Outcome {
    /// The command, for messages.
    pub command: String,
    /// Its exit code; 128 + n if signal n ended it.
    pub code: i32,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Outcome {
    /// Its output. Fails unless its exit code is 0.
    #[track_caller]
    pub fn ok(&self) -> &str {
        assert_eq!(self.code, 0, "{self:#?}");
        &self.stdout
    }

    /// Its output as JSON. Fails unless its exit code is 0.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(self.ok()).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// The function's error. Fails unless the function failed, with all these words in its error.
    #[track_caller]
    pub fn function_error(&self, words: &[&str]) -> Value {
        assert_eq!(self.code, 3, "{self:#?}");
        self.holds(&self.stdout, words);
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }

    /// Fails unless it exited with code 1, without output, and with an error that contains all
    /// these words.
    #[track_caller]
    pub fn refused(&self, words: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (1, ""), "{self:#?}");
        let text = self.stderr.strip_prefix("firn: error: ");
        let text = text.unwrap_or_else(|| panic!("no error text: {self:#?}"));
        self.holds(text, words);
        assert!(
            !text.chars().any(|c| c.is_control() && c != '\n'),
            "control characters: {self:#?}"
        );
        assert!(
            !text.contains("panicked") && !text.contains("Error {"),
            "contains Rust's debug output: {self:#?}"
        );
        // An error's text is followed by its cause's. The two may not repeat each other.
        let parts: Vec<&str> = text.trim_end().split(": ").collect();
        for (at, part) in parts.iter().enumerate() {
            assert!(!parts[..at].contains(part), "repeats {part:?}: {self:#?}");
        }
    }

    /// Fails unless it exited with the code for wrong arguments and a text that contains all these
    /// words.
    #[track_caller]
    pub fn wrong_arguments(&self, words: &[&str]) {
        assert_eq!((self.code, self.stdout.as_str()), (2, ""), "{self:#?}");
        self.holds(&self.stderr, words);
    }

    #[track_caller]
    fn holds(&self, text: &str, words: &[&str]) {
        for word in words {
            assert!(text.contains(word), "without {word:?}: {self:#?}");
        }
    }
}
