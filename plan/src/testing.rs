//! Helpers of tests in several folders.

use std::path::Path;

/// Checks that a generated page of `docs/reference` is current; `flag` is the one of `shardlab
/// schema` that prints it. With `INSTA_UPDATE=always`, as for snapshots, the page is written.
pub(crate) fn assert_page_is_current(page: &str, file: &str, flag: &str) {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference");
    let path = Path::new(folder).join(file);
    if std::env::var_os("INSTA_UPDATE").is_some_and(|v| v == "always") {
        std::fs::write(&path, page).unwrap();
    }
    let current = std::fs::read_to_string(path).is_ok_and(|written| written == page);
    assert!(
        current,
        "run: shardlab schema {flag} > docs/reference/{file}"
    );
}
