//! Choices that can be tried out on a GPU: `SHARDLAB_TUNE=name=value,...`. For finding defaults, not for runs.

/// The choice of this name, or the default.
pub(super) fn choice(name: &str, default: usize) -> usize {
    let all = std::env::var("SHARDLAB_TUNE").unwrap_or_default();
    all.split(',')
        .filter_map(|pair| pair.split_once('='))
        .find(|(n, _)| *n == name)
        .and_then(|(_, v)| v.parse().ok())
        .unwrap_or(default)
}
