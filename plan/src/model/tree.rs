//! Module tree and parameters of each family.

use crate::config::pattern::covers;
use crate::config::{Bias, Family, Model, Scenario};
use crate::ir::{Module, ModuleId, ModuleKind, Param, ParamId, Shape};
use smallvec::smallvec;

/// Where the repeated blocks lie in the tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// How many.
    pub(crate) count: u32,
    /// Module of the first block.
    pub(crate) module: u32,
    /// Modules of one block.
    pub(crate) modules: u32,
    /// First parameter of the first block.
    pub(crate) param: u32,
    /// Parameters of one block.
    pub(crate) params: u32,
}

impl Blocks {
    /// The block a module lies in.
    pub(crate) fn block_of(&self, m: ModuleId) -> Option<u32> {
        let inside = self.module..self.module + self.count * self.modules;
        inside
            .contains(&m.0)
            .then(|| (m.0 - self.module) / self.modules)
    }
}

/// Modules in pre-order, parameters in registration order.
#[derive(Clone, Debug)]
pub(crate) struct Tree {
    pub(crate) modules: Vec<Module>,
    pub(crate) params: Vec<Param>,
    /// Weight and bias of each module.
    own: Vec<[Option<ParamId>; 2]>,
    pub(crate) blocks: Blocks,
}

/// A module inside a block: relative path, parent (index within the block), kind.
type Inner = (&'static str, u32, ModuleKind);
/// A leaf with parameters inside a block, in registration order: module (index within the block), weight shape, bias.
type Leaf = (u32, Shape, bool);

const LLAMA: [Inner; 12] = [
    ("", 0, ModuleKind::Block),
    ("attention", 0, ModuleKind::Attention),
    ("attention.norm", 1, ModuleKind::Norm),
    ("attention.q", 1, ModuleKind::Layer),
    ("attention.k", 1, ModuleKind::Layer),
    ("attention.v", 1, ModuleKind::Layer),
    ("attention.o", 1, ModuleKind::Layer),
    ("mlp", 0, ModuleKind::Mlp),
    ("mlp.norm", 7, ModuleKind::Norm),
    ("mlp.w1", 7, ModuleKind::Layer),
    ("mlp.w3", 7, ModuleKind::Layer),
    ("mlp.w2", 7, ModuleKind::Layer),
];

/// [`LLAMA`] with norms of queries and keys, where Qwen3 has them.
const LLAMA_QK_NORM: [Inner; 14] = [
    ("", 0, ModuleKind::Block),
    ("attention", 0, ModuleKind::Attention),
    ("attention.norm", 1, ModuleKind::Norm),
    ("attention.q", 1, ModuleKind::Layer),
    ("attention.k", 1, ModuleKind::Layer),
    ("attention.v", 1, ModuleKind::Layer),
    ("attention.o", 1, ModuleKind::Layer),
    ("attention.q_norm", 1, ModuleKind::Norm),
    ("attention.k_norm", 1, ModuleKind::Norm),
    ("mlp", 0, ModuleKind::Mlp),
    ("mlp.norm", 9, ModuleKind::Norm),
    ("mlp.w1", 9, ModuleKind::Layer),
    ("mlp.w3", 9, ModuleKind::Layer),
    ("mlp.w2", 9, ModuleKind::Layer),
];

const GPT2: [Inner; 9] = [
    ("", 0, ModuleKind::Block),
    ("attention", 0, ModuleKind::Attention),
    ("attention.ln_1", 1, ModuleKind::Norm),
    ("attention.c_attn", 1, ModuleKind::Layer),
    ("attention.c_proj", 1, ModuleKind::Layer),
    ("mlp", 0, ModuleKind::Mlp),
    ("mlp.ln_2", 5, ModuleKind::Norm),
    ("mlp.c_fc", 5, ModuleKind::Layer),
    ("mlp.c_proj", 5, ModuleKind::Layer),
];

const ENCODER: [Inner; 9] = [
    ("", 0, ModuleKind::Block),
    ("attention", 0, ModuleKind::Attention),
    ("attention.in_proj", 1, ModuleKind::Layer),
    ("attention.out_proj", 1, ModuleKind::Layer),
    ("attention.norm1", 1, ModuleKind::Norm),
    ("mlp", 0, ModuleKind::Mlp),
    ("mlp.linear1", 5, ModuleKind::Layer),
    ("mlp.linear2", 5, ModuleKind::Layer),
    ("mlp.norm2", 5, ModuleKind::Norm),
];

const SINGLE: [Inner; 1] = [("", 0, ModuleKind::Block)];

fn block_of(m: &Model) -> (&'static [Inner], Vec<Leaf>) {
    let (d, ff, bias) = (m.hidden, m.ffn, m.bias == Bias::All);
    let qkv = m.bias != Bias::None;
    let (q, kv) = (m.heads * m.head_dim, m.kv_heads * m.head_dim);
    match m.family {
        Family::Llama => {
            let (inner, mlp): (&[Inner], _) = match m.qk_norm {
                false => (&LLAMA, 7),
                true => (&LLAMA_QK_NORM, 9),
            };
            let mut leaves = vec![
                (2, smallvec![d], false),
                (mlp + 1, smallvec![d], false),
                (3, smallvec![q, d], qkv),
                (4, smallvec![kv, d], qkv),
                (5, smallvec![kv, d], qkv),
                (6, smallvec![d, q], bias),
                (mlp + 2, smallvec![ff, d], bias),
                (mlp + 3, smallvec![ff, d], bias),
                (mlp + 4, smallvec![d, ff], bias),
            ];
            if m.qk_norm {
                let norms = [7, 8].map(|norm| (norm, smallvec![m.head_dim], false));
                leaves.splice(6..6, norms);
            }
            (inner, leaves)
        }
        Family::Gpt2 => (
            &GPT2,
            vec![
                (2, smallvec![d], true),
                (3, smallvec![q + 2 * kv, d], bias),
                (4, smallvec![d, q], bias),
                (6, smallvec![d], true),
                (7, smallvec![ff, d], bias),
                (8, smallvec![d, ff], bias),
            ],
        ),
        Family::Encoder => (
            &ENCODER,
            vec![
                (2, smallvec![q + 2 * kv, d], bias),
                (3, smallvec![d, q], bias),
                (6, smallvec![ff, d], bias),
                (7, smallvec![d, ff], bias),
                (4, smallvec![d], true),
                (8, smallvec![d], true),
            ],
        ),
        Family::Linear => (&SINGLE, vec![(0, smallvec![d, d], bias)]),
        Family::Cnn => (
            &SINGLE,
            vec![(
                0,
                smallvec![m.channels, m.channels, m.kernel, m.kernel],
                bias,
            )],
        ),
    }
}

impl Tree {
    /// The tree of a scenario's model with this many blocks.
    pub(crate) fn new(s: &Scenario, layers: u32) -> Self {
        let m = &s.model;
        let mut t = Self {
            modules: Vec::new(),
            params: Vec::new(),
            own: Vec::new(),
            blocks: Blocks::default(),
        };
        let root = t.module(String::new(), None, ModuleKind::Root);
        match m.family {
            Family::Llama => {
                let e = t.module("tok_embeddings".into(), Some(root), ModuleKind::Embedding);
                t.weight(
                    e,
                    "tok_embeddings.weight".into(),
                    smallvec![m.vocab, m.hidden],
                );
            }
            Family::Gpt2 => {
                let e = t.module("tok_embeddings".into(), Some(root), ModuleKind::Embedding);
                let wte = t.module("tok_embeddings.wte".into(), Some(e), ModuleKind::Layer);
                let wpe = t.module("tok_embeddings.wpe".into(), Some(e), ModuleKind::Layer);
                t.weight(
                    wte,
                    "tok_embeddings.wte.weight".into(),
                    smallvec![m.vocab, m.hidden],
                );
                t.weight(
                    wpe,
                    "tok_embeddings.wpe.weight".into(),
                    smallvec![m.max_seq_len, m.hidden],
                );
            }
            Family::Encoder | Family::Linear | Family::Cnn => {}
        }
        t.add_blocks(m, layers, root);
        t.add_head(m, root);
        t.module("loss".into(), Some(root), ModuleKind::Loss);
        t.freeze(&s.fsdp.frozen);
        t
    }

    fn add_blocks(&mut self, m: &Model, layers: u32, root: ModuleId) {
        let (inner, leaves) = block_of(m);
        self.blocks = Blocks {
            count: layers,
            module: self.modules.len() as u32,
            modules: inner.len() as u32,
            param: self.params.len() as u32,
            params: 0,
        };
        for layer in 0..layers {
            let base = self.modules.len() as u32;
            for &(path, parent, kind) in inner {
                let parent = if path.is_empty() {
                    root
                } else {
                    ModuleId(base + parent)
                };
                let path = if path.is_empty() {
                    format!("layers.{layer}")
                } else {
                    format!("layers.{layer}.{path}")
                };
                self.module(path, Some(parent), kind);
            }
            for (leaf, shape, bias) in &leaves {
                self.layer(ModuleId(base + leaf), shape.clone(), *bias);
            }
            self.blocks.params = (self.params.len() as u32 - self.blocks.param) / (layer + 1);
        }
    }

    fn add_head(&mut self, m: &Model, root: ModuleId) {
        let d = m.hidden;
        match m.family {
            Family::Llama | Family::Gpt2 => {
                let norm = self.module("norm".into(), Some(root), ModuleKind::Norm);
                self.layer(norm, smallvec![d], m.family == Family::Gpt2);
                let head = self.module("output".into(), Some(root), ModuleKind::Head);
                if m.tie_embeddings {
                    // The embedding's table is the first parameter; the head is its second owner.
                    self.params[0].modules.push(head);
                    self.own[head.index()][0] = Some(ParamId(0));
                } else {
                    self.layer(head, smallvec![m.vocab, d], false);
                }
            }
            Family::Encoder => {
                let head = self.module("output".into(), Some(root), ModuleKind::Head);
                self.layer(head, smallvec![d, d], m.bias == Bias::All);
            }
            Family::Cnn => {
                let head = self.module("dense".into(), Some(root), ModuleKind::Head);
                self.layer(head, smallvec![1, m.channels], m.bias == Bias::All);
            }
            Family::Linear => {}
        }
    }

    fn module(&mut self, path: String, parent: Option<ModuleId>, kind: ModuleKind) -> ModuleId {
        let id = ModuleId(self.modules.len() as u32);
        self.modules.push(Module { path, parent, kind });
        self.own.push([None, None]);
        id
    }

    fn param(&mut self, module: ModuleId, name: String, shape: Shape) -> ParamId {
        let id = ParamId(self.params.len() as u32);
        self.params.push(Param {
            name,
            modules: smallvec![module],
            shape,
            requires_grad: true,
        });
        id
    }

    fn weight(&mut self, module: ModuleId, name: String, shape: Shape) {
        let id = self.param(module, name, shape);
        self.own[module.index()][0] = Some(id);
    }

    fn layer(&mut self, module: ModuleId, shape: Shape, bias: bool) {
        let path = self.modules[module.index()].path.clone();
        let out = shape[0];
        self.weight(module, format!("{path}.weight"), shape);
        if bias {
            let id = self.param(module, format!("{path}.bias"), smallvec![out]);
            self.own[module.index()][1] = Some(id);
        }
    }

    fn freeze(&mut self, globs: &[String]) {
        if globs.is_empty() {
            return;
        }
        let frozen: Vec<bool> = self
            .modules
            .iter()
            .map(|m| globs.iter().any(|g| covers(g, &m.path)))
            .collect();
        for p in &mut self.params {
            p.requires_grad = !p.modules.iter().any(|m| frozen[m.index()]);
        }
    }

    /// Weight of a module.
    ///
    /// # Panics
    /// When it has none: the family's forward and its tree disagree.
    pub(crate) fn weight_of(&self, m: ModuleId) -> ParamId {
        self.own[m.index()][0].expect("the family's tree gives this module a weight")
    }

    /// Bias of a module, if it has one.
    pub(crate) fn bias_of(&self, m: ModuleId) -> Option<ParamId> {
        self.own[m.index()][1]
    }

    /// The module of this kind outside the blocks.
    ///
    /// # Panics
    /// When there is none: the family's forward and its tree disagree.
    pub(crate) fn outer(&self, kind: ModuleKind) -> ModuleId {
        let inside =
            self.blocks.module..self.blocks.module + self.blocks.count * self.blocks.modules;
        let at = (0..self.modules.len() as u32)
            .filter(|i| !inside.contains(i))
            .find(|&i| self.modules[i as usize].kind == kind)
            .expect("the family's tree has a module of this kind");
        ModuleId(at)
    }

    /// The modules of a block, in pre-order.
    pub(crate) fn block<const N: usize>(&self, layer: u32) -> [ModuleId; N] {
        debug_assert_eq!(N, self.blocks.modules as usize);
        std::array::from_fn(|i| {
            ModuleId(self.blocks.module + layer * self.blocks.modules + i as u32)
        })
    }
}
