//! What holds for the text of this repository, so that a reader's minute stays a minute.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Longest source file, and longest function, in lines.
const MAX_FILE_LINES: usize = 500;
const MAX_FUNCTION_LINES: usize = 70;

/// Folders with text of ours.
const FOLDERS: [&str; 8] = ["schema", "relay", "subscriber", "migrations", "tests", "dev", "ops", ".ci"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace").to_owned()
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        // What a broker's build or a package manager leaves there is not ours.
        if path.is_dir() && !matches!(path.file_name().and_then(|name| name.to_str()), Some("target" | "node_modules" | ".dev")) {
            collect(&path, files);
        } else if path.is_file() {
            files.push(path);
        }
    }
}

/// Every text file of ours with its path below the root.
fn texts() -> Vec<(String, String)> {
    let root = root();
    let mut files: Vec<_> =
        std::fs::read_dir(&root).expect("the root can be read").flatten().map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    for folder in FOLDERS {
        collect(&root.join(folder), &mut files);
    }
    let text = |path: PathBuf| Some((path.strip_prefix(&root).ok()?.to_str()?.to_owned(), std::fs::read_to_string(&path).ok()?));
    files.into_iter().filter_map(text).collect()
}

fn rust() -> Vec<(String, String)> {
    texts().into_iter().filter(|(path, _)| path.ends_with(".rs")).collect()
}

/// The code of a line, without its comment.
fn code(line: &str) -> &str {
    line.split_once("//").map_or(line, |(code, _)| code)
}

#[test]
fn pure_modules_do_no_io_and_read_no_clock() {
    let banned =
        ["tokio", "sqlx", "rdkafka", "redis::", "SystemTime", "Instant", "std::fs", "std::net", "std::process", "std::env", "clock::"];
    let pure: Vec<_> = rust().into_iter().filter(|(_, text)| text.starts_with("//! PURE")).collect();
    assert!(pure.len() >= 15, "only {} modules say PURE", pure.len());
    for (path, text) in pure {
        let product = text.split("#[cfg(test)]\nmod ").next().unwrap_or(&text);
        for (number, line) in product.lines().enumerate() {
            for word in banned {
                assert!(!code(line).contains(word), "{path}:{} says PURE and uses {word}", number + 1);
            }
        }
    }
}

#[test]
fn no_source_file_is_longer_than_can_be_read_in_one_go() {
    for (path, text) in texts() {
        if [".rs", ".sql", ".lua", ".sh"].iter().any(|end| path.ends_with(end)) {
            let lines = text.lines().count();
            assert!(lines <= MAX_FILE_LINES, "{path} has {lines} lines, {MAX_FILE_LINES} are allowed; split it by subject");
        }
    }
}

/// The name, when a line begins a function.
fn function(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().peekable();
    while words.next_if(|word| word.starts_with("pub") || matches!(*word, "async" | "const" | "unsafe")).is_some() {}
    (words.next()? == "fn").then(|| words.next()).flatten()
}

#[test]
fn no_function_is_longer_than_a_screen() {
    for (path, text) in rust() {
        let lines: Vec<_> = text.lines().collect();
        for (start, line) in lines.iter().enumerate() {
            let Some(name) = function(line) else { continue };
            let end = format!("{}}}", &line[..line.len() - line.trim_start().len()]);
            // Formatted code closes a function where it began; a function on one line has no such end before the next one.
            let length = lines[start..].iter().position(|line| **line == end || (line.ends_with('}') && function(line).is_some()));
            let length = length.map_or(1, |length| length + 1);
            assert!(length <= MAX_FUNCTION_LINES, "{path}:{}: {name} has {length} lines, {MAX_FUNCTION_LINES} are allowed", start + 1);
        }
    }
}

#[test]
fn every_guarantee_in_the_readme_is_the_name_of_a_test() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("there is a README.md");
    let mut linked = BTreeSet::new();
    for line in readme.lines() {
        // A link to the file, the test's name in backticks on the same line.
        for rest in line.split("tests/tests/promises/").skip(1) {
            let Some((file, _)) = rest.split_once(".rs") else { continue };
            let text = std::fs::read_to_string(root().join(format!("tests/tests/promises/{file}.rs")));
            let text = text.unwrap_or_else(|_| panic!("README.md links to tests/tests/promises/{file}.rs, which is not there"));
            let names = line.split('`').skip(1).step_by(2).filter(|name| name.contains('_') && !name.contains(['/', '.', ' ', ':']));
            let found: Vec<_> = names.filter(|name| text.contains(&format!("fn {name}("))).collect();
            assert!(!found.is_empty(), "README.md links to {file}.rs and names none of its tests: {line}");
            linked.extend(found.into_iter().map(str::to_owned));
        }
    }
    assert!(linked.len() >= 8, "each promise of the README names its test; only {} do", linked.len());
}

#[test]
fn no_file_names_the_host_of_a_registry_or_a_path_of_somebodys_machine() {
    // In pieces, so that this file does not name them either.
    let hosts = [
        "index.crates|.io",
        "static.crates|.io",
        "registry-1.docker|.io",
        "repo1.maven|.org",
        "repo.maven.apache|.org",
        "registry.npmjs|.org",
        "pypi|.org",
    ];
    let paths = ["/ro|ot/", "/wo|rk/", "/ho|me/"];
    let banned: Vec<_> = hosts.iter().chain(&paths).map(|word| word.replace('|', "")).collect();
    for (path, text) in texts().into_iter().filter(|(path, _)| path != "Cargo.lock") {
        for word in &banned {
            assert!(!text.contains(word.as_str()), "{path} contains {word}");
        }
    }
}

#[test]
fn tests_are_named_as_promises() {
    for (path, text) in rust().into_iter().filter(|(path, _)| path.starts_with("tests/tests/promises/")) {
        let lines: Vec<_> = text.lines().collect();
        for pair in lines.windows(2).filter(|pair| pair[0].ends_with("#[test]") || pair[0].ends_with("#[tokio::test]")) {
            let name = function(pair[1]).unwrap_or_default();
            assert!(!name.starts_with("test_") && name.matches('_').count() >= 3, "{path}: {name} is no sentence");
        }
    }
}
