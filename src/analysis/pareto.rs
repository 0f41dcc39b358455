//! Points that no other point beats in everything.

/// For each point `(time, memory)` whether it is on the front: no other point is at least as good in both and better in
/// one. Of equal points all are on it. Points with a NaN are not.
#[must_use]
pub fn front(points: &[(f64, f64)]) -> Vec<bool> {
    let mut order: Vec<usize> = (0..points.len())
        .filter(|&i| !points[i].0.is_nan() && !points[i].1.is_nan())
        .collect();
    order.sort_by(|&a, &b| {
        let (a, b) = (points[a], points[b]);
        a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1))
    });
    let mut on = vec![false; points.len()];
    let mut best: Option<(f64, f64)> = None;
    for i in order {
        let point = points[i];
        if best.is_none_or(|b| point.1 < b.1 || point == b) {
            on[i] = true;
            best = Some(point);
        }
    }
    on
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_has_exactly_the_undominated_points() {
        let points = [
            (3.0, 1.0),
            (1.0, 3.0),
            (2.0, 2.0),
            (2.0, 2.0),
            (2.0, 2.5),
            (3.0, 1.5),
            (f64::NAN, 0.0),
        ];
        let dominated = |i: usize| {
            points
                .iter()
                .any(|p| p.0 <= points[i].0 && p.1 <= points[i].1 && *p != points[i])
        };
        let on = front(&points);
        for (i, &on) in on.iter().enumerate().take(6) {
            assert_eq!(on, !dominated(i), "{i}");
        }
        assert!(!on[6]);
    }
}
