//! The README's reference of settings is the code's.

use recant_schema::service::config::reference;
use std::path::Path;

#[test]
fn the_reference_in_the_readme_is_the_one_in_the_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace");
    let readme = std::fs::read_to_string(root.join("README.md")).expect("README.md can be read");
    for table in [
        reference(recant_relay::config::FIELDS, recant_relay::config::PREFIX),
        reference(recant_subscriber::config::FIELDS, recant_subscriber::config::PREFIX),
    ] {
        assert!(readme.contains(&table), "replace the table in README.md by:\n\n{table}");
    }
}
