//! Compares the statistics with scipy 1.17.1, and tests properties that hold for any samples.

use proptest::prelude::*;
use shardlab_reports::stats::{
    Magnitude, Options, Samples, StatsError, Verdict, adjusted, cliffs_delta, compare, hedges_g,
    mann_whitney, ratio_of_medians, welch,
};

const A: [f64; 7] = [10.1, 9.8, 10.4, 10.0, 9.9, 10.2, 10.3];
const B: [f64; 5] = [10.9, 11.2, 10.8, 11.0, 10.5];
const TIED_A: [f64; 4] = [3.0, 3.0, 4.0, 5.0];
const TIED_B: [f64; 5] = [3.0, 4.0, 6.0, 7.0, 7.0];

fn near(got: f64, expected: f64) {
    assert!(
        (got - expected).abs() <= 1e-9 * expected.abs().max(1.0),
        "{got} instead of {expected}"
    );
}

/// `stats.ttest_ind(a, b, equal_var=False)` (its t is A minus B, ours B minus A).
#[test]
fn welch_agrees_with_scipy() {
    let w = welch(&A, &B).unwrap();
    near(w.t, 5.506_263_422_419_662);
    near(w.df, 7.699_638_109_671_896);
    near(w.p, 0.000_650_144_749_170_212_5);
    let w = welch(&TIED_A, &TIED_B).unwrap();
    near(w.t, 1.749_815_896_059_666_8);
    near(w.df, 6.254_597_828_497_457);
    near(w.p, 0.128_707_522_104_954_53);
    assert_eq!(welch(&[1.0], &B), None);
    assert_eq!(welch(&[2.0, 2.0], &[2.0, 2.0]), None);
}

/// `stats.mannwhitneyu(b, a, alternative='two-sided', method=…)`.
#[test]
fn mann_whitney_agrees_with_scipy() {
    let few = mann_whitney(&A, &B);
    assert!(few.exact);
    near(few.u, 35.0);
    near(few.p, 0.002_525_252_525_252_525_5);
    // Exchanging the sides gives the same p.
    near(mann_whitney(&B, &A).p, few.p);
    // By hand: among all 20 orders of three and three, 7 each have U = 3 or less and U = 6 or more.
    near(mann_whitney(&[1.0, 5.0, 3.0], &[4.0, 2.0, 6.0]).p, 0.7);
    near(mann_whitney(&[1.0, 2.0, 3.0], &[4.0, 5.0, 6.0]).p, 0.1);
    let tied = mann_whitney(&TIED_A, &TIED_B);
    assert!(!tied.exact);
    near(tied.u, 15.5);
    near(tied.p, 0.208_912_381_740_698_48);
    near(mann_whitney(&[2.0, 2.0], &[2.0, 2.0]).p, 1.0);
}

/// `np.sign(b[:, None] - a[None, :]).mean()`; Hedges by its formula in numpy.
#[test]
fn effect_sizes_agree_with_numpy() {
    near(cliffs_delta(&A, &B), 1.0);
    near(cliffs_delta(&TIED_A, &TIED_B), 0.55);
    near(hedges_g(&A, &B).unwrap(), 3.075_687_567_780_353_2);
    near(hedges_g(&TIED_A, &TIED_B).unwrap(), 0.971_628_171_000_610_9);
    assert_eq!(Magnitude::of(-0.4), Magnitude::Medium);
}

/// `stats.false_discovery_control`.
#[test]
fn adjustment_agrees_with_scipy() {
    let got = adjusted(&[0.01, 0.04, 0.03, 0.005, 0.5]);
    for (got, expected) in got.iter().zip([0.025, 0.05, 0.05, 0.025, 0.5]) {
        near(*got, expected);
    }
}

/// With three samples per side, all 729 pairs of resamples can be listed: ratios 12/13 (49), 14/13
/// (91), 12/11 (91), 15/13 (49), 1.2 (49), 14/11 (169), 15/11 (91), 1.4 (91), 1.5 (49).
#[test]
fn the_interval_is_that_of_the_listed_resamples() {
    let (a, b) = ([10.0, 11.0, 13.0], [12.0, 14.0, 15.0]);
    let at = |level: f64| {
        let options = Options {
            level,
            resamples: 50_000,
            ..Options::default()
        };
        ratio_of_medians(&a, &b, &options)
    };
    let wide = at(0.95);
    near(wide.estimate, 14.0 / 11.0);
    // Each outermost value has 49 / 729 = 6.7 %: 2.5 % ends there, 10 % ends one value further in.
    near(wide.low, 12.0 / 13.0);
    near(wide.high, 1.5);
    let narrow = at(0.8);
    near(narrow.low, 14.0 / 13.0);
    near(narrow.high, 1.4);
}

fn judged(a: &[f64], b: &[f64]) -> Verdict {
    compare(
        Samples::Measured(a),
        Samples::Measured(b),
        &Options::default(),
    )
    .unwrap()
    .verdict
}

#[test]
fn verdicts_say_when_the_samples_cannot_tell() {
    assert_eq!(judged(&A, &B), Verdict::Regressed);
    assert_eq!(judged(&B, &A), Verdict::Improved);
    let tight = [10.0, 10.01, 9.99, 10.02, 9.98];
    assert_eq!(judged(&tight, &tight), Verdict::Equal);
    let wild = [5.0, 20.0, 9.0, 13.0];
    assert_eq!(judged(&wild, &tight), Verdict::Inconclusive);
    // Fewer than three measurements are inconclusive, however far apart; a prediction is exact.
    assert_eq!(judged(&[10.0], &[20.0]), Verdict::Inconclusive);
    assert_eq!(judged(&[10.0, 10.1], &[20.0, 20.1]), Verdict::Inconclusive);
    assert_eq!(
        judged(&[10.0, 10.1, 10.2], &[20.0, 20.1, 20.2]),
        Verdict::Regressed
    );
    // Two steps are two blocks, so their interval has a width.
    let options = Options {
        block: Options::block_of(2),
        ..Options::default()
    };
    let (a, b) = ([10.0, 11.0], [10.0, 11.0]);
    let c = compare(Samples::Measured(&a), Samples::Measured(&b), &options).unwrap();
    assert!(c.ratio.low < 1.0 && c.ratio.high > 1.0, "{:?}", c.ratio);
    assert!(c.sentence("A", "B").contains("3 or more measurements"));
    // The other side's blocks may be longer than this side's series.
    let long = Options {
        block: 6,
        ..Options::default()
    };
    let c = compare(Samples::Measured(&A), Samples::Measured(&B[..3]), &long).unwrap();
    assert!(c.ratio.low < c.ratio.high);
    let exact = |x| Samples::Exact(x);
    let options = Options::default();
    let c = compare(exact(10.0), exact(10.5), &options).unwrap();
    assert_eq!(c.verdict, Verdict::Regressed);
    assert_eq!(
        c.sentence("A", "B"),
        "B is 5.0 % slower: 10.00 ms → 10.50 ms."
    );
    // Predictions are judged by the tolerance, not by the threshold of measurements.
    let judged = |b: f64| compare(exact(10.0), exact(b), &options).unwrap().verdict;
    assert_eq!(judged(10.04), Verdict::Equal);
    assert_eq!(judged(10.06), Verdict::Regressed);
    assert_eq!(judged(9.94), Verdict::Improved);
    let c = compare(
        Samples::Measured(&wild),
        Samples::Measured(&tight),
        &options,
    )
    .unwrap();
    let sentence = c.sentence("A", "B");
    assert!(sentence.starts_with("Inconclusive"), "{sentence}");
    let c = compare(exact(10.0), Samples::Measured(&tight), &options).unwrap();
    assert_eq!(c.verdict, Verdict::Equal);
    assert_eq!(c.mann_whitney, None);
}

#[test]
fn bad_samples_are_named() {
    let options = Options::default();
    let error = compare(
        Samples::Measured(&A),
        Samples::Measured(&[1.0, f64::NAN]),
        &options,
    )
    .unwrap_err();
    assert_eq!(
        error.to_string(),
        "sample 1 of B is NaN; a positive number is expected"
    );
    let error = compare(Samples::Measured(&[]), Samples::Exact(1.0), &options).unwrap_err();
    assert_eq!(error, StatsError::Empty("A"));
    let wrong = Options {
        level: 1.0,
        ..options
    };
    assert!(compare(Samples::Exact(1.0), Samples::Exact(1.0), &wrong).is_err());
}

/// Returns medians of step times with 1 % noise, from a fixed linear congruential generator.
fn noisy(seed: u64, n: usize, centre: f64) -> Vec<f64> {
    let mut state = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(99);
    (0..n)
        .map(|_| {
            let mut sum = 0.0;
            for _ in 0..12 {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                sum += (state >> 11) as f64 / (1u64 << 53) as f64;
            }
            // The sum of twelve uniform numbers minus six has variance 1.
            centre * (1.0 + 0.01 * (sum - 6.0))
        })
        .collect()
}

#[test]
fn false_alarms_are_rare_and_real_changes_are_found() {
    let options = Options {
        resamples: 300,
        ..Options::default()
    };
    let count = |change: f64, verdict: Verdict| {
        (0..400u64)
            .filter(|&i| {
                let (a, b) = (noisy(2 * i, 5, 100.0), noisy(2 * i + 1, 5, 100.0 * change));
                compare(Samples::Measured(&a), Samples::Measured(&b), &options)
                    .unwrap()
                    .verdict
                    == verdict
            })
            .count()
    };
    assert!(count(1.0, Verdict::Regressed) <= 4);
    assert!(count(1.0, Verdict::Improved) <= 4);
    assert!(count(1.05, Verdict::Regressed) >= 370);
    assert!(count(0.95, Verdict::Improved) >= 370);
}

prop_compose! {
    fn samples()(all in prop::collection::vec(1.0f64..1000.0, 2..30)) -> Vec<f64> { all }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Exchanging the sides inverts the result.
    #[test]
    fn sides_are_symmetric(a in samples(), b in samples()) {
        prop_assert!((cliffs_delta(&a, &b) + cliffs_delta(&b, &a)).abs() < 1e-12);
        let (ab, ba) = (mann_whitney(&a, &b), mann_whitney(&b, &a));
        prop_assert!((ab.u + ba.u - (a.len() * b.len()) as f64).abs() < 1e-9);
        prop_assert!((ab.p - ba.p).abs() < 1e-9);
        let (ab, ba) = (welch(&a, &b).unwrap(), welch(&b, &a).unwrap());
        prop_assert!((ab.t + ba.t).abs() < 1e-9);
        prop_assert!((ab.p - ba.p).abs() < 1e-12);
    }

    /// The unit of time changes no ratio, test or verdict. The interval contains the estimate and
    /// grows with the level.
    #[test]
    fn units_do_not_matter(a in samples(), b in samples(), unit in 1u32..20, block in 1usize..4) {
        let options = Options { resamples: 300, block, ..Options::default() };
        let scale = 2f64.powi(unit as i32);
        let scaled = |all: &[f64]| all.iter().map(|x| x * scale).collect::<Vec<_>>();
        let plain = compare(Samples::Measured(&a), Samples::Measured(&b), &options).unwrap();
        let (x, y) = (scaled(&a), scaled(&b));
        let other = compare(Samples::Measured(&x), Samples::Measured(&y), &options).unwrap();
        prop_assert_eq!(plain.verdict, other.verdict);
        prop_assert_eq!(plain.ratio, other.ratio);
        prop_assert_eq!(plain.mann_whitney, other.mann_whitney);
        prop_assert!(plain.ratio.low <= plain.ratio.high);
        let narrow = Options { level: 0.5, ..options };
        let narrow = ratio_of_medians(&a, &b, &narrow);
        prop_assert!(plain.ratio.low <= narrow.low && narrow.high <= plain.ratio.high);
    }

    /// A larger change is detected more often, and the detectable change with a probability of 80
    /// %.
    #[test]
    fn power_grows_with_the_change(a in samples(), b in samples()) {
        let of = |threshold: f64| {
            let options = Options { threshold, resamples: 1, ..Options::default() };
            compare(Samples::Measured(&a), Samples::Measured(&b), &options).unwrap()
        };
        let (small, large) = (of(0.01), of(0.3));
        prop_assert!(small.power.unwrap() <= large.power.unwrap() + 1e-9);
        let detectable = small.detectable.unwrap();
        if detectable < 0.99 {
            prop_assert!((of(detectable).power.unwrap() - 0.8).abs() < 1e-4);
        }
    }
}
