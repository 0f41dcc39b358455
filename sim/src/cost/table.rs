//! Interpolation in measured tables.

/// Interpolates a table of (bytes, microseconds), ascending in bytes, linearly between logarithms.
/// Returns the value and whether it is within the table. Below the table, the result is the first
/// time (a latency); above it, the last rate applies.
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

/// Factor between the sizes of two rows above which they do not determine a power law between them.
const APART: u64 = 256;

/// Extrapolation of a table of memory-bound kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Beyond {
    /// Duration of the shortest kernel, in microseconds.
    pub(super) shortest: f64,
    /// Rate in bytes per microsecond above which a row is no longer a latency.
    pub(super) fast: f64,
    /// Rate in bytes per microsecond that the class reaches.
    pub(super) usual: f64,
}

/// Interpolates a table of memory-bound kernels, whose time is a latency plus bytes divided by a
/// rate. Between distant rows (a flag and a gradient buffer), the interpolation is a straight line.
/// Below a first row that is not a latency, it is the line from the shortest kernel's time at zero
/// bytes. Above a last row that is a latency, additional bytes are moved at the usual rate.
pub(super) fn of_memory(rows: &[(u64, f64)], bytes: u64, beyond: Beyond) -> Option<(f64, bool)> {
    let Beyond {
        shortest,
        fast,
        usual,
    } = beyond;
    let (&first, &last) = (rows.first()?, rows.last()?);
    let line = |a: (u64, f64), b: (u64, f64)| {
        a.1 + (b.1 - a.1) * (bytes - a.0) as f64 / (b.0 - a.0) as f64
    };
    if bytes < first.0 && first.0 as f64 >= fast * first.1 {
        return Some((line((0, shortest.min(first.1)), first), false));
    }
    if bytes > last.0 && (last.0 as f64) < fast * last.1 {
        return Some((last.1 + (bytes - last.0) as f64 / usual, false));
    }
    if bytes > first.0 && bytes < last.0 {
        let i = rows.partition_point(|r| r.0 <= bytes);
        let (a, b) = (rows[i - 1], rows[i]);
        if b.0 / a.0.max(1) >= APART {
            return Some((line(a, b), true));
        }
    }
    log_interpolate(rows, bytes)
}

#[cfg(test)]
mod tests {
    use super::{Beyond, log_interpolate, of_memory};

    #[test]
    fn lines_reach_over_wide_gaps_and_below_a_first_row_that_is_no_latency() {
        // 2 us and 1 us per MB, with nothing measured between a megabyte and a gigabyte.
        let mb = 1_000_000;
        let rows = [(mb, 3.0), (1_000 * mb, 1_002.0), (2_000 * mb, 2_002.0)];
        let beyond = |shortest: f64, fast: f64| Beyond {
            shortest,
            fast,
            usual: 2e6,
        };
        let at = |bytes: u64, fast: f64| of_memory(&rows, bytes, beyond(2.0, fast)).unwrap();
        let near = |(us, inside): (f64, bool), want: f64, within: bool| {
            assert!(
                (us - want).abs() < 1e-9 && inside == within,
                "{us} instead of {want}"
            );
        };
        near(at(mb, 1e5), 3.0, true);
        near(at(100 * mb, 1e5), 102.0, true);
        near(at(1_000 * mb, 1e5), 1_002.0, true);
        near(at(mb / 2, 1e5), 2.5, false);
        near(at(0, 1e5), 2.0, false);
        near(at(4_000 * mb, 1e5), 4_004.0, false);
        // A first row far below the bandwidth is a latency; close rows are interpolated as in all
        // tables.
        near(at(mb / 2, 1e7), 3.0, false);
        assert_eq!(
            at(1_500 * mb, 1e5),
            log_interpolate(&rows, 1_500 * mb).unwrap()
        );
        // Below a first row that is shorter than the shortest kernel, its time applies.
        let short = of_memory(&[(100, 1.0)], 50, beyond(2.0, 1.0));
        assert_eq!(short, Some((1.0, false)));
        assert_eq!(of_memory(&[], 1, beyond(2.0, 1.0)), None);
        // The last row is 24 KB in 7 us. Its rate is meaningless: 2 MB more take one microsecond.
        let small = of_memory(&[(24_000, 7.0)], 2_024_000, beyond(2.0, 1e6));
        near(small.unwrap(), 8.0, false);
    }

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
