//! The documentation: commands run and print what the pages show, numbers match the tables, and
//! links are valid.

mod accuracy;
mod book;
mod names;
#[cfg(unix)]
mod pasted;

use std::path::Path;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

fn read(path: &str) -> String {
    std::fs::read_to_string(Path::new(ROOT).join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

#[test]
fn the_front_pages_are_short() {
    for (page, most) in [("README.md", 150), ("BENCHMARKS.md", 120)] {
        let lines = read(page).lines().count();
        assert!(lines <= most, "{page} has {lines} lines");
    }
}
