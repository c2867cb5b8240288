//! The migrations are embedded at compile time; cargo has to look at their folder to notice a new one.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
