//! Settings: one TOML file, then environment overrides, every problem reported at once.
//!
//! A service declares its settings as a table of [`Field`]s. The same table is the reference in the documentation ([`reference()`]), so neither
//! can know a key that the other does not.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

/// One setting.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The key in the file; the environment variable is the prefix and this in capitals.
    pub name: &'static str,
    /// What holds when it is not set.
    pub default: Default,
    /// Whether its value is never printed and may also come from a file named by `<name>_file`.
    pub secret: bool,
    /// One line for the reference.
    pub help: &'static str,
}

/// What holds when a setting is not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Default {
    /// The service does not start without it.
    Required,
    /// Nothing; the help says what that means.
    Unset,
    /// This text, read as if it stood in the environment.
    Value(&'static str),
}

/// A value that is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// Wraps a secret value.
    pub fn new(value: String) -> Self {
        Self(value)
    }

    /// The value itself, for the one call that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Everything that is wrong with a configuration, one line each.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct Problems(pub Vec<String>);

#[derive(Clone, Debug)]
enum Raw {
    Text(String),
    List(Vec<String>),
    Table(BTreeMap<String, String>),
}

/// Settings being read. Each getter takes one and notes what is wrong with it; [`Settings::finish`] reports everything.
#[derive(Debug)]
pub struct Settings {
    fields: &'static [Field],
    prefix: &'static str,
    values: BTreeMap<String, Raw>,
    problems: Vec<String>,
}

/// The environment of this process.
#[expect(clippy::disallowed_methods, reason = "this is the module that the ban points to")]
pub fn process_environment() -> Vec<(String, String)> {
    std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))).collect()
}

impl Settings {
    /// Reads the file, if there is one, and then the variables that begin with `prefix` (such as `RELAY_`). Unknown keys are problems.
    pub fn load(fields: &'static [Field], prefix: &'static str, file: Option<&Path>, environment: &[(String, String)]) -> Self {
        let mut settings = Self { fields, prefix, values: BTreeMap::new(), problems: Vec::new() };
        if let Some(path) = file {
            settings.read_file(path);
        }
        settings.read_environment(environment);
        settings
    }

    fn read_file(&mut self, path: &Path) {
        let table = match std::fs::read_to_string(path).map(|text| text.parse::<toml::Table>()) {
            Ok(Ok(table)) => table,
            Ok(Err(error)) => return self.problems.push(format!("{}: not TOML: {}", path.display(), error.message())),
            Err(error) => return self.problems.push(format!("{}: could not be read: {error}", path.display())),
        };
        for (name, value) in table {
            match (self.knows(&name), raw(value)) {
                (false, _) => self.problems.push(format!("{}: unknown key {name}; --help lists the keys", path.display())),
                (true, None) => {
                    self.problems.push(format!("{}: {name} must be a text, number, list of texts or table of texts", path.display()))
                }
                (true, Some(value)) => drop(self.values.insert(name, value)),
            }
        }
    }

    fn read_environment(&mut self, environment: &[(String, String)]) {
        for (variable, value) in environment {
            let Some(rest) = variable.strip_prefix(self.prefix) else { continue };
            let name = rest.to_lowercase();
            if self.knows(&name) {
                self.values.insert(name, Raw::Text(value.clone()));
            } else if rest != "CONFIG" && !is_kubernetes_link(rest) {
                self.problems.push(format!("{variable}: unknown setting; --help lists the settings"));
            }
        }
    }

    fn knows(&self, name: &str) -> bool {
        let of_secret = |name: &str| self.fields.iter().any(|field| field.secret && field.name == name);
        self.fields.iter().any(|field| field.name == name) || name.strip_suffix("_file").is_some_and(of_secret)
    }

    fn take(&mut self, name: &'static str) -> Option<Raw> {
        let field = self.fields.iter().find(|field| field.name == name).expect("getters name declared fields");
        match (self.values.remove(name), field.default) {
            (Some(value), _) => Some(value),
            (None, Default::Value(text)) => Some(Raw::Text(text.to_owned())),
            (None, Default::Unset) => None,
            (None, Default::Required) => {
                let (variable, help) = (self.variable(name), field.help);
                self.problems.push(format!("{name} is not set: {help} (key {name} in the file, or {variable})"));
                None
            }
        }
    }

    fn variable(&self, name: &str) -> String {
        format!("{}{}", self.prefix, name.to_uppercase())
    }

    /// Notes a problem with one setting.
    pub fn problem(&mut self, name: &str, text: impl fmt::Display) {
        self.problems.push(format!("{name}: {text}"));
    }

    /// A text, `None` when unset or wrong.
    pub fn text(&mut self, name: &'static str) -> Option<String> {
        match self.take(name)? {
            Raw::Text(text) => Some(text),
            Raw::List(_) | Raw::Table(_) => {
                self.problem(name, "must be one text");
                None
            }
        }
    }

    /// A text read by `parse`; its error is a problem.
    pub fn parsed<T, E: fmt::Display>(&mut self, name: &'static str, parse: impl FnOnce(&str) -> Result<T, E>) -> Option<T> {
        let text = self.text(name)?;
        parse(&text).map_err(|error| self.problem(name, error)).ok()
    }

    /// A secret, from its key, its variable, or the file named by `<name>_file` (trailing white space cut).
    pub fn secret(&mut self, name: &'static str) -> Option<Secret> {
        let from_file = match self.values.remove(&format!("{name}_file")) {
            Some(Raw::Text(path)) => match std::fs::read_to_string(&path) {
                Ok(text) => Some(text.trim_end().to_owned()),
                Err(error) => {
                    self.problem(name, format_args!("the file {path} could not be read: {error}"));
                    Some(String::new())
                }
            },
            Some(_) => {
                self.problem(name, "its _file must be one path");
                None
            }
            None => None,
        };
        match from_file {
            Some(text) => Some(Secret(text)),
            None => self.text(name).map(Secret),
        }
    }

    /// A whole number within bounds. Wrong or missing: a problem, and the lower bound.
    pub fn whole(&mut self, name: &'static str, bounds: RangeInclusive<u64>) -> u64 {
        let (low, high) = (*bounds.start(), *bounds.end());
        let read = |text: &str| match text.trim().parse::<u64>() {
            Ok(number) if bounds.contains(&number) => Ok(number),
            _ => Err(format!("{text:?} is not a whole number from {low} to {high}")),
        };
        self.parsed(name, read).unwrap_or(low)
    }

    /// A time in milliseconds within bounds.
    pub fn milliseconds(&mut self, name: &'static str, bounds: RangeInclusive<u64>) -> Duration {
        Duration::from_millis(self.whole(name, bounds))
    }

    /// A list of texts; in the environment separated by commas. Empty parts are dropped.
    pub fn list(&mut self, name: &'static str) -> Vec<String> {
        match self.take(name) {
            Some(Raw::List(list)) => list,
            Some(Raw::Text(text)) => text.split(',').map(|part| part.trim().to_owned()).filter(|part| !part.is_empty()).collect(),
            Some(Raw::Table(_)) => {
                self.problem(name, "must be a list of texts");
                Vec::new()
            }
            None => Vec::new(),
        }
    }

    /// A table of texts; in the environment `a=1,b=2`.
    pub fn table(&mut self, name: &'static str) -> BTreeMap<String, String> {
        match self.take(name) {
            Some(Raw::Table(table)) => table,
            Some(Raw::Text(text)) => {
                let mut table = BTreeMap::new();
                for part in text.split(',').filter(|part| !part.trim().is_empty()) {
                    match part.split_once('=') {
                        Some((key, value)) => drop(table.insert(key.trim().to_owned(), value.trim().to_owned())),
                        // The part is not repeated: it may be the rest of a password.
                        None => self.problem(
                            name,
                            "a part between commas is not of the form option=value; a value with a comma goes into the file",
                        ),
                    }
                }
                table
            }
            Some(Raw::List(_)) => {
                self.problem(name, "must be a table of texts");
                BTreeMap::new()
            }
            None => BTreeMap::new(),
        }
    }

    /// Everything that was wrong.
    ///
    /// # Errors
    /// [`Problems`], unless there is none.
    pub fn finish(self) -> Result<(), Problems> {
        debug_assert!(self.values.is_empty(), "declared but never read: {:?}", self.values.keys().collect::<BTreeSet<_>>());
        if self.problems.is_empty() { Ok(()) } else { Err(Problems(self.problems)) }
    }
}

/// Kubernetes gives every pod variables named after the services beside it; a Service called `relay` makes `RELAY_PORT` and `RELAY_SERVICE_HOST`.
fn is_kubernetes_link(rest: &str) -> bool {
    rest == "PORT" || rest.starts_with("PORT_") || rest.starts_with("SERVICE_")
}

fn raw(value: toml::Value) -> Option<Raw> {
    let text = |value: &toml::Value| match value {
        toml::Value::String(text) => Some(text.clone()),
        toml::Value::Integer(number) => Some(number.to_string()),
        toml::Value::Boolean(flag) => Some(flag.to_string()),
        _ => None,
    };
    match &value {
        toml::Value::Array(items) => items.iter().map(text).collect::<Option<Vec<_>>>().map(Raw::List),
        toml::Value::Table(table) => {
            table.iter().map(|(key, value)| Some((key.clone(), text(value)?))).collect::<Option<_>>().map(Raw::Table)
        }
        single => text(single).map(Raw::Text),
    }
}

/// The settings as plain text, for `--help`.
pub fn help(fields: &[Field], prefix: &str) -> String {
    let mut text = format!("Settings, by their keys in the TOML file; as a variable {prefix} and the key in capitals.\n");
    for field in fields {
        let default = match field.default {
            Default::Required => " (required)".to_owned(),
            Default::Unset => String::new(),
            Default::Value(value) => format!(" (default {value})"),
        };
        let secret = if field.secret { &format!(" Secret: also from the file named by {}_file.", field.name) } else { "" };
        text += &format!("\n{}{default}\n    {}{secret}", field.name, field.help);
    }
    text
}

/// The settings as a Markdown table, for the documentation.
pub fn reference(fields: &[Field], prefix: &str) -> String {
    let mut text = String::from("| key | variable | default | meaning |\n| --- | --- | --- | --- |\n");
    for field in fields {
        let default = match field.default {
            Default::Required => "required".to_owned(),
            Default::Unset => "unset".to_owned(),
            Default::Value("") => "empty".to_owned(),
            Default::Value(value) => format!("`{value}`"),
        };
        let secret = if field.secret { " Secret: also by `_file`." } else { "" };
        text += &format!("| `{}` | `{prefix}{}` | {default} | {}{secret} |\n", field.name, field.name.to_uppercase(), field.help);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: &[Field] = &[
        Field { name: "url", default: Default::Required, secret: true, help: "where to connect" },
        Field { name: "size", default: Default::Value("10"), secret: false, help: "how many" },
        Field { name: "names", default: Default::Unset, secret: false, help: "which" },
        Field { name: "options", default: Default::Unset, secret: false, help: "more" },
    ];

    fn load(environment: &[(&str, &str)]) -> Settings {
        let environment: Vec<_> = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Settings::load(FIELDS, "T_", None, &environment)
    }

    #[test]
    fn every_problem_is_reported_at_once() {
        let mut settings = load(&[("T_SIZE", "0"), ("T_SISE", "1"), ("T_OPTIONS", "a"), ("T_SERVICE_HOST", "10.0.0.1"), ("OTHER", "x")]);
        assert_eq!(settings.secret("url"), None);
        assert_eq!(settings.whole("size", 1..=20), 1);
        assert!(settings.table("options").is_empty());
        let problems = settings.finish().unwrap_err().0;
        assert_eq!(problems.len(), 4, "{problems:?}");
        assert!(problems[0].starts_with("T_SISE: unknown setting"), "{problems:?}");
        assert!(problems[1].contains("T_URL"), "{problems:?}");
    }

    #[test]
    fn lists_and_tables_are_read_from_the_environment() {
        let mut settings = load(&[("T_URL", "x"), ("T_NAMES", "a, b,"), ("T_OPTIONS", "k.a=1,k.b=x=y")]);
        assert_eq!(settings.secret("url").unwrap().expose(), "x");
        assert_eq!(settings.list("names"), ["a", "b"]);
        assert_eq!(settings.table("options")["k.b"], "x=y");
        assert_eq!(settings.whole("size", 1..=20), 10);
        settings.finish().unwrap();
    }

    #[test]
    fn a_secret_is_never_printed() {
        assert_eq!(format!("{:?}", Secret::new("hunter2".into())), "(secret)");
    }
}
