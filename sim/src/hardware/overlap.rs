//! Tables that hold the same shapes.
//!
//! A profile may have several tables of one kind of kernel: measured in running layers, for example, and alone. The first that has
//! a shape counts. The rows of a later one, which only it has, are scaled by how the two differ on the shapes they share, in the
//! median: a shape beside a measured one must not cost more or less because it is only in the other table.

use super::profile::{AttentionRow, GemmRow, Profile};
use std::collections::HashMap;
use std::hash::Hash;

/// Lets tables of one kind agree.
pub(super) fn reconcile(p: &mut Profile) {
    let gemm = |r: &mut GemmRow| ([r.0, r.1, r.2], r.3);
    let time = |r: &mut GemmRow, us| r.3 = us;
    for tables in [&mut p.gemm, &mut p.conv] {
        agree(tables, |t| (t.dtype, &mut t.rows), gemm, time);
    }
    agree(
        &mut p.attention,
        |t| ((t.dtype, t.causal, t.backward), &mut t.rows),
        |r: &mut AttentionRow| ([r.0, r.1, r.2, r.3, r.4], r.5),
        |r, us| r.5 = us,
    );
}

fn agree<T, R, K: Eq + Hash + Copy, S: Eq + Hash + Copy>(
    tables: &mut [T],
    parts: impl Fn(&mut T) -> (K, &mut Vec<R>),
    row: impl Fn(&mut R) -> (S, f64),
    set: impl Fn(&mut R, f64),
) {
    let mut known: HashMap<(K, S), f64> = HashMap::new();
    for table in tables {
        let (kind, rows) = parts(table);
        let mut ratios: Vec<f64> = rows
            .iter_mut()
            .filter_map(|r| {
                let (shape, us) = row(r);
                Some(known.get(&(kind, shape))? / us)
            })
            .collect();
        ratios.sort_by(f64::total_cmp);
        let ratio = match ratios.len() {
            0 => 1.0,
            n => ratios[(n - 1) / 2].midpoint(ratios[n / 2]),
        };
        rows.retain_mut(|r| {
            let (shape, us) = row(r);
            set(r, us * ratio);
            let new = !known.contains_key(&(kind, shape));
            if new {
                known.insert((kind, shape), us * ratio);
            }
            new
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::load;
    use crate::hardware::{GemmRow, GemmTable};
    use shardlab_plan::units::DType;

    #[test]
    fn the_first_of_a_shape_counts_and_later_tables_are_scaled() {
        let mut p = load("cpu").unwrap();
        let table = |dtype, rows: &[(u64, f64)]| GemmTable {
            source: "test".to_owned(),
            dtype,
            rows: rows.iter().map(|&(m, us)| GemmRow(m, 8, 8, us)).collect(),
        };
        p.gemm = vec![
            table(DType::F32, &[(1, 10.0), (2, 20.0), (3, 33.0)]),
            table(DType::Bf16, &[(1, 1.0), (9, 2.0)]),
            // Half as long, half as long, a third as long on shared shapes; twice in one table.
            table(
                DType::F32,
                &[(1, 5.0), (2, 10.0), (3, 11.0), (4, 20.0), (4, 25.0)],
            ),
            table(DType::F32, &[(4, 80.0), (5, 100.0)]),
        ];
        super::reconcile(&mut p);
        let rows =
            |i: usize| -> Vec<(u64, f64)> { p.gemm[i].rows.iter().map(|r| (r.0, r.3)).collect() };
        assert_eq!(rows(0), [(1, 10.0), (2, 20.0), (3, 33.0)]);
        assert_eq!(rows(1), [(1, 1.0), (9, 2.0)]);
        assert_eq!(rows(2), [(4, 40.0)]);
        assert_eq!(rows(3), [(5, 50.0)]);
    }
}
