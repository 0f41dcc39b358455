//! Gradients that autograd allocates, one a parameter, when the first kernel adds to it.

use super::builder::NewBuffer;
use super::context::Cx;
use super::walk::Location;
use crate::program::{BufferId, COMPUTE, Holds, ParamId, Pool, Role, Rule};

/// Which parameters have a gradient now, and the buffers that hold them in every micro-batch.
#[derive(Clone, Debug)]
pub(crate) struct AutogradGrads {
    live: Vec<Option<BufferId>>,
    made: Vec<Option<BufferId>>,
}

impl AutogradGrads {
    pub(crate) fn new(params: usize) -> Self {
        Self {
            live: vec![None; params],
            made: vec![None; params],
        }
    }

    /// Where a kernel writes the gradient of `p`; allocated if there is none.
    pub(crate) fn location(&mut self, cx: &mut Cx<'_>, p: ParamId) -> Location {
        let dtype = cx.compute_dtype();
        let buffer = *self.live[p.index()].get_or_insert_with(|| {
            let id = *self.made[p.index()].get_or_insert_with(|| {
                let (g, _) = cx.home[p.index()];
                let unit = cx.group(g).unit;
                let bytes = cx.tape.params[p.index()].numel() * dtype.size();
                cx.b.buffer(NewBuffer {
                    role: Role::FullGrad,
                    bytes,
                    dtype,
                    pool: Pool::Caching,
                    stream: COMPUTE,
                    unit,
                    holds: Holds::Param(p),
                })
            });
            cx.b.alloc(Rule::Grad, id);
            id
        });
        Location {
            buffer,
            offset: 0,
            element: dtype.size(),
        }
    }

    /// Hands the gradient over: whoever takes it copies it away and frees it.
    pub(crate) fn take(&mut self, p: ParamId) -> Option<BufferId> {
        self.live[p.index()].take()
    }
}
