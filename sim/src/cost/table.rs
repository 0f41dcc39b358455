//! Interpolation in measured tables.

/// Interpolates a table of (bytes, microseconds), ascending in bytes, linearly in logarithms. Returns the value and
/// whether it lies within the table; below it the first time holds (a latency), above it the last rate.
pub(crate) fn log_interpolate(rows: &[(u64, f64)], bytes: u64) -> Option<(f64, bool)> {
    let (&first, &last) = (rows.first()?, rows.last()?);
    if bytes <= first.0 {
        return Some((first.1, bytes == first.0));
    }
    if bytes >= last.0 {
        return Some((last.1 * bytes as f64 / last.0 as f64, bytes == last.0));
    }
    let i = rows.partition_point(|r| r.0 <= bytes);
    let (a, b) = (rows[i - 1], rows[i]);
    if a.0 == bytes {
        return Some((a.1, true));
    }
    let x = (bytes as f64 / a.0 as f64).ln() / (b.0 as f64 / a.0 as f64).ln();
    Some(((a.1.ln() + x * (b.1.ln() - a.1.ln())).exp(), true))
}

#[cfg(test)]
mod tests {
    use super::log_interpolate;

    #[test]
    fn rows_are_exact_and_between_them_is_geometric() {
        let rows = [(100, 1.0), (10_000, 4.0)];
        assert_eq!(log_interpolate(&rows, 100), Some((1.0, true)));
        assert_eq!(log_interpolate(&rows, 10_000), Some((4.0, true)));
        let (mid, inside) = log_interpolate(&rows, 1_000).unwrap();
        assert!(inside && (mid - 2.0).abs() < 1e-12);
        assert_eq!(log_interpolate(&rows, 1), Some((1.0, false)));
        assert_eq!(log_interpolate(&rows, 20_000), Some((8.0, false)));
        assert_eq!(log_interpolate(&[], 1), None);
    }
}
