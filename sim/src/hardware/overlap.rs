//! Tables with the same shapes.
//!
//! A profile may have several tables for one kind of kernel, for example measured within layers and
//! in isolation. The first table that contains a shape counts. Rows that only a later table has are
//! scaled by the median ratio of both tables on their common shapes: a shape close to a measured
//! one must not cost more or less only because it is in the other table. Tables of memory-bound
//! kernels are interpolated, so they are merged into one.

use super::profile::{AttentionRow, GemmRow, GroupedGemmRow, MemoryTable, Profile};
use std::collections::HashMap;
use std::hash::Hash;

/// Makes the tables of each kind consistent.
pub(super) fn reconcile(p: &mut Profile) {
    let gemm = |r: &mut GemmRow| ([r.0, r.1, r.2], r.3);
    let time = |r: &mut GemmRow, us| r.3 = us;
    for tables in [&mut p.gemm, &mut p.conv] {
        agree(tables, |t| (t.kind(), &mut t.rows), gemm, time);
    }
    agree(
        &mut p.grouped_gemm,
        |t| ((t.kind(), t.gradient()), &mut t.rows),
        |r: &mut GroupedGemmRow| ([r.0, r.1, r.2, r.3], r.4),
        |r, us| r.4 = us,
    );
    agree(
        &mut p.attention,
        |t| {
            let kind = (t.dtype, t.causal, t.mask, t.backward, t.backend);
            (kind, &mut t.rows)
        },
        |r: &mut AttentionRow| ([r.0, r.1, r.2, r.3, r.4], r.5),
        |r, us| r.5 = us,
    );
    p.memory = joined(std::mem::take(&mut p.memory));
}

/// Merges the tables of each kind of memory-bound kernel into one.
fn joined(mut tables: Vec<MemoryTable>) -> Vec<MemoryTable> {
    let kind = |t: &MemoryTable| {
        let key = (t.class, t.op.clone(), t.dtype, t.columns);
        (key, t.in_step, t.counted())
    };
    agree(
        &mut tables,
        |t| (kind(t), &mut t.rows),
        |r: &mut (u64, f64)| *r,
        |r, us| r.1 = us,
    );
    let mut all: Vec<MemoryTable> = Vec::new();
    for table in tables {
        match all.iter_mut().find(|t| kind(t) == kind(&table)) {
            Some(first) => {
                first.rows.extend(table.rows);
                first.rows.sort_by_key(|r| r.0);
            }
            None => all.push(table),
        }
    }
    all
}

/// Returns the median; 1 for an empty list.
fn median(mut ratios: Vec<f64>) -> f64 {
    ratios.sort_by(f64::total_cmp);
    match ratios.len() {
        0 => 1.0,
        n => ratios[(n - 1) / 2].midpoint(ratios[n / 2]),
    }
}

fn agree<T, R, K: Eq + Hash, S: Eq + Hash + Copy>(
    tables: &mut [T],
    parts: impl Fn(&mut T) -> (K, &mut Vec<R>),
    row: impl Fn(&mut R) -> (S, f64),
    set: impl Fn(&mut R, f64),
) {
    let mut all: HashMap<K, HashMap<S, f64>> = HashMap::new();
    for table in tables {
        let (kind, rows) = parts(table);
        let known = all.entry(kind).or_default();
        let ratios = rows.iter_mut().filter_map(|r| {
            let (shape, us) = row(r);
            Some(known.get(&shape)? / us)
        });
        let ratio = median(ratios.collect());
        rows.retain_mut(|r| {
            let (shape, us) = row(r);
            set(r, us * ratio);
            let new = !known.contains_key(&shape);
            if new {
                known.insert(shape, us * ratio);
            }
            new
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::load;
    use crate::hardware::{GemmRow, GemmTable, MemoryTable};
    use shardlab_plan::ir::DType;

    #[test]
    fn the_first_of_a_shape_counts_and_later_tables_are_scaled() {
        let mut p = load("cpu").unwrap();
        let table = |dtype, rows: &[(u64, f64)]| GemmTable {
            source: "test".to_owned(),
            dtype,
            scaling: None,
            fast_accum: None,
            rows: rows.iter().map(|&(m, us)| GemmRow(m, 8, 8, us)).collect(),
        };
        p.gemm = vec![
            table(DType::F32, &[(1, 10.0), (2, 20.0), (3, 33.0)]),
            table(DType::Bf16, &[(1, 1.0), (9, 2.0)]),
            // Half as long, half as long and a third as long on the common shapes; twice as long in
            // one table.
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

    #[test]
    fn tables_of_one_kind_of_kernel_bound_by_memory_become_one() {
        let shipped = |name| load(name).unwrap().memory;
        let first = shipped("cpu")[0].clone();
        let table = |op: Option<&str>, rows: &[(u64, f64)]| MemoryTable {
            op: op.map(str::to_owned),
            rows: rows.to_vec(),
            ..first.clone()
        };
        let all = super::joined(vec![
            table(Some("a"), &[(10, 1.0), (30, 3.0)]),
            table(Some("b"), &[(20, 9.0)]),
            // Twice as long on the common sizes.
            table(Some("a"), &[(20, 5.0), (30, 6.0), (40, 8.0)]),
            table(None, &[(20, 7.0)]),
        ]);
        assert_eq!(
            all,
            [
                table(Some("a"), &[(10, 1.0), (20, 2.5), (30, 3.0), (40, 4.0)]),
                table(Some("b"), &[(20, 9.0)]),
                table(None, &[(20, 7.0)]),
            ]
        );
        // Shipped profiles contain every shape only once.
        for name in crate::hardware::shipped() {
            let once = shipped(name);
            assert_eq!(super::joined(once.clone()), once, "{name}");
        }
    }
}
