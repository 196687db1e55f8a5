use std::os::unix::fs::symlink;

use super::*;

fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::Builder::new().prefix("function-").tempdir().unwrap();
    for (name, contents) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, contents).unwrap();
    }
    folder
}

#[test]
fn a_folder_with_handler_py_is_a_function() {
    let made = folder(&[
        ("handler.py", "h"),
        ("lib/__init__.py", ""),
        ("lib/part.py", "p"),
        ("lib/__pycache__/part.pyc", "c"),
        (".hidden", "x"),
        ("data.json", "{}"),
    ]);
    let function = Function::from_path(made.path()).unwrap();
    assert_eq!(function.handler(), "handler.handler");
    assert_eq!(function.name(), made.path().file_name().unwrap().to_str().unwrap());
    let names: Vec<_> = function.files().keys().map(String::as_str).collect();
    assert_eq!(names, ["data.json", "handler.py", "lib/__init__.py", "lib/part.py"]);
    assert_eq!(function.files()["lib/part.py"], b"p");
}

#[test]
fn a_single_file_is_a_function() {
    let made = folder(&[("resize.py", "r"), ("other.py", "o")]);
    let function = Function::from_path(&made.path().join("resize.py")).unwrap();
    assert_eq!((function.name(), function.handler()), ("resize", "resize.handler"));
    assert_eq!(function.files().keys().collect::<Vec<_>>(), ["resize.py"]);
}

#[test]
fn all_functions_of_this_repository_are_valid() {
    let functions = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest/functions");
    let mut found = 0;
    for entry in fs::read_dir(functions).unwrap() {
        let folder = entry.unwrap();
        let function = Function::from_path(&folder.path()).unwrap();
        assert_eq!(function.name(), folder.file_name().to_str().unwrap());
        assert!(function.settings().source.is_some(), "{} has no source", function.name());
        let numbers: Vec<_> = function.settings().tolerance.keys().collect();
        for name in ["input-a.json", "input-b.json", "expected-a.json", "expected-b.json"] {
            let text = fs::read(folder.path().join(name)).unwrap();
            let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
            if name.starts_with("expected") {
                assert!(numbers.iter().all(|key| value[key].is_number()), "{}", function.name());
            }
        }
        found += 1;
    }
    assert_eq!(found, 24);
}

#[test]
fn an_invalid_function_is_refused_with_the_reason() {
    let made = folder(&[("notes.txt", "n"), ("a.b.py", "x")]);
    let path = made.path();
    let error = |path: &Path| Function::from_path(path).unwrap_err();
    assert!(matches!(error(&path.join("gone")), FunctionPathError::Missing { .. }));
    assert!(matches!(error(&path.join("notes.txt")), FunctionPathError::NotPython { .. }));
    assert!(matches!(error(&path.join("a.b.py")), FunctionPathError::Name { .. }));
    assert!(matches!(error(path), FunctionPathError::NoHandler { .. }));
    let text = error(path).to_string();
    assert!(text.contains(path.to_str().unwrap()) && text.contains("handler.py"), "{text}");
}

#[test]
fn links_in_a_loop_and_special_files_are_refused() {
    let made = folder(&[("handler.py", "h")]);
    symlink(made.path(), made.path().join("circle")).unwrap();
    let error = Function::from_path(made.path()).unwrap_err();
    assert!(matches!(error, FunctionPathError::NotPlain { .. }), "{error}");

    let made = folder(&[("handler.py", "h")]);
    rustix::fs::mkfifoat(rustix::fs::CWD, made.path().join("pipe"), 0o600.into()).unwrap();
    let error = Function::from_path(made.path()).unwrap_err();
    assert!(matches!(error, FunctionPathError::NotPlain { .. }), "{error}");
}

#[test]
fn a_function_over_the_limit_is_refused_before_it_is_read() {
    let made = folder(&[("handler.py", "h")]);
    let large = fs::File::create(made.path().join("model.bin")).unwrap();
    let limit = u64::try_from(MAX_FUNCTION_BYTES).unwrap();
    large.set_len(limit).unwrap();
    let error = Function::from_path(made.path()).unwrap_err();
    assert!(matches!(error, FunctionPathError::TooLarge { .. }), "{error}");
    large.set_len(limit - 1).unwrap();
    assert_eq!(Function::from_path(made.path()).unwrap().files().len(), 2);
}

#[test]
fn a_function_may_include_files_of_other_functions() {
    let made = folder(&[
        ("other/handler.py", "other's"),
        ("other/shared.py", "other's"),
        ("other/function.toml", "memory_mib = 1"),
        ("third/shared.py", "third's"),
        ("mine/handler.py", "mine"),
        ("mine/function.toml", "files_of = [\"../other\", \"../third\"]\nimage = \"science\""),
    ]);
    let function = Function::from_path(&made.path().join("mine")).unwrap();
    let files = function.files();
    assert_eq!(files["handler.py"], b"mine");
    assert_eq!(files["shared.py"], b"third's");
    assert_eq!(function.settings().image.as_ref().unwrap().as_str(), "science");
    assert_eq!(function.settings().memory_mib, None);
}

#[test]
fn invalid_settings_are_refused_with_their_file_and_line() {
    let made = folder(&[("handler.py", "h"), ("function.toml", "vcpus = 1\nmemory = 2")]);
    let error = Function::from_path(made.path()).unwrap_err();
    assert!(error.to_string().contains("function.toml"), "{error}");
    let source = std::error::Error::source(&error).unwrap().to_string();
    assert!(source.contains("line 2") && source.contains("memory"), "{source}");

    let made = folder(&[("handler.py", "h"), ("function.toml", "files_of = [\"../absent\"]")]);
    let error = Function::from_path(made.path()).unwrap_err().to_string();
    assert!(error.contains("absent"), "{error}");
}
