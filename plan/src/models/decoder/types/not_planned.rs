//! Types of transformers that are known but not planned.

/// What each type has that no family has, and the type that is closest to it, if a plan of it says
/// something about the type: that of the language model alone, or one without the missing part.
pub(in crate::models) const NOT_PLANNED: &[(&str, &str, Option<&str>)] = &[
    (
        "aria",
        "rows that attend to those of the image, as many as its size asks for",
        Some("aria_text"),
    ),
    (
        "axk2",
        "norms with gates in latent attention",
        Some("deepseek_v32"),
    ),
    (
        "beam",
        "gates of attention with a bias for each head, and residuals that are scaled by depth",
        Some("qwen3_moe"),
    ),
    (
        "bert-generation",
        "a decoder of BERT, with or without attention to an encoder",
        None,
    ),
    (
        "bit",
        "convolutions with strides, whose weights are normalized, and norms of groups of channels",
        None,
    ),
    (
        "blip",
        "a text model whose blocks all attend to the image",
        None,
    ),
    ("blt", "patches of bytes of different lengths", None),
    (
        "canary",
        "an audio tower with attention and convolutions (Conformer)",
        None,
    ),
    (
        "canine",
        "characters whose positions a convolution makes fewer",
        None,
    ),
    ("chameleon", "tokens of images (VQ-VAE)", Some("llama")),
    (
        "convbert",
        "convolutions whose kernels tokens make, next to attention",
        None,
    ),
    ("cpmant", "segments with biases of relative positions", None),
    ("cvt", "convolutions before attention in each stage", None),
    (
        "deepseek_ocr2",
        "two vision towers, one of them with windows (SAM)",
        None,
    ),
    (
        "deepseek_vl_hybrid",
        "two vision towers, one of them with windows (SAM)",
        Some("llama"),
    ),
    ("dia", "several streams of audio codes", None),
    ("dinat", "attention to neighbors", None),
    (
        "doge",
        "masks that values make, and experts of single rows",
        None,
    ),
    (
        "dory",
        "layers that it runs several times, on vectors of length 1",
        None,
    ),
    (
        "Dream",
        "attention to all positions of a sequence that it fills (diffusion)",
        Some("qwen2"),
    ),
    (
        "dots3_note",
        "latent attention with windows in some layers, and n-grams",
        None,
    ),
    (
        "dots3_note_text",
        "latent attention with windows in some layers, and n-grams",
        None,
    ),
    (
        "efficientnet",
        "convolutions with strides and norms of batches",
        None,
    ),
    ("emu3", "tokens of images (VQ-VAE)", Some("llama")),
    ("encoder-decoder", "two models in one file", None),
    ("ernie4_5_vl_moe", "experts of images and of text", None),
    (
        "evolla",
        "a tower of proteins, to whose rows blocks attend",
        Some("llama"),
    ),
    (
        "fast_vlm",
        "a tower of timm, whose layers the file does not give",
        None,
    ),
    (
        "florence2",
        "a tower with attention to channels",
        Some("bart"),
    ),
    ("fnet", "Fourier transforms in place of attention", None),
    (
        "focalnet",
        "other layers in place of attention, in stages of different widths",
        None,
    ),
    (
        "fsmt",
        "tables of source and target languages of different sizes",
        None,
    ),
    ("funnel", "stages with fewer rows each", None),
    (
        "fuyu",
        "patches of images that a linear layer embeds among tokens",
        Some("persimmon"),
    ),
    (
        "gemma3n",
        "a vision tower (MobileNet-V5 of timm) and an audio tower",
        Some("gemma3n_text"),
    ),
    (
        "gemma4_unified",
        "patches and sounds that layers embed among tokens",
        Some("gemma4_unified_text"),
    ),
    (
        "git",
        "a vision tower whose rows precede all tokens, which see each other",
        None,
    ),
    (
        "got_ocr2",
        "a vision tower with windows and convolutions (SAM)",
        Some("qwen2"),
    ),
    (
        "gpt_neox_japanese",
        "a bias in the attention of the last block alone",
        None,
    ),
    (
        "granite4_vision",
        "projectors of several blocks of the tower, coarse and fine",
        Some("granite"),
    ),
    (
        "granite_docling",
        "projectors of several blocks of the tower, coarse and fine",
        Some("granite"),
    ),
    (
        "granite_speech5_ctc",
        "blocks with attention and convolutions (Conformer)",
        None,
    ),
    (
        "granite_speech_plus",
        "an audio tower with attention and convolutions (Conformer)",
        Some("granite"),
    ),
    (
        "gte",
        "a bias in the last layer of feed-forward layers alone",
        Some("nomic_bert"),
    ),
    (
        "hgnet_v2",
        "convolutions with strides and norms of batches",
        None,
    ),
    ("hiera", "stages whose queries are pooled", None),
    (
        "hrm_text",
        "stacks of layers that it runs several times",
        Some("llama"),
    ),
    (
        "hy_v4",
        "latent attention with gates and sinks, and residual streams that are mixed",
        None,
    ),
    (
        "ibert",
        "layers that are quantized while they are trained",
        Some("roberta"),
    ),
    (
        "idefics",
        "blocks between those of the language model that attend to images",
        Some("llama"),
    ),
    ("imagegpt", "tokens of colors, and norms of its own", None),
    (
        "inkling2",
        "short convolutions of queries, keys and values, and biases of relative positions that tokens make",
        None,
    ),
    (
        "inkling2_loop",
        "short convolutions of queries, keys and values, and biases of relative positions that tokens make",
        None,
    ),
    (
        "inkling2_loop_text",
        "short convolutions of queries, keys and values, and biases of relative positions that tokens make",
        None,
    ),
    (
        "inkling2_text",
        "short convolutions of queries, keys and values, and biases of relative positions that tokens make",
        None,
    ),
    (
        "inkling_mm_model",
        "short convolutions of queries, keys and values, and biases of relative positions that tokens make",
        None,
    ),
    (
        "inkling_text",
        "short convolutions of queries, keys and values, and biases of relative positions that tokens make",
        None,
    ),
    ("janus", "tokens of images (VQ-VAE)", Some("llama")),
    ("kosmos-2", "learned rows and towers of their own", None),
    ("kosmos-2.5", "learned rows and towers of their own", None),
    (
        "kyutai_speech_to_text",
        "several streams of audio codes",
        None,
    ),
    (
        "lasr_ctc",
        "blocks with attention and convolutions (Conformer)",
        None,
    ),
    (
        "layoutlmv2",
        "tables of places on a page in two dimensions, and patches of its image",
        None,
    ),
    (
        "layoutlmv3",
        "tables of places on a page in two dimensions, and patches of its image",
        None,
    ),
    (
        "levit",
        "attention with norms of batches, in stages whose queries are fewer",
        None,
    ),
    (
        "lfm3_vl",
        "a tower with convolutions over two dimensions",
        Some("lfm3"),
    ),
    ("lilt", "a second stream for places on a page", None),
    (
        "luke",
        "entities, whose pairs with tokens have projections of their own",
        Some("roberta"),
    ),
    ("markuplm", "tables of tags of a page", Some("bert")),
    (
        "maskformer-swin",
        "stages of a Swin without an output layer",
        Some("swin"),
    ),
    (
        "metaclip_2",
        "a text tower whose vector is that of the first end of a text",
        None,
    ),
    (
        "mobilebert",
        "blocks with narrow inner layers (bottlenecks)",
        None,
    ),
    (
        "mobilenet_v1",
        "convolutions with strides and norms of batches",
        None,
    ),
    (
        "mobilenet_v2",
        "convolutions with strides and norms of batches",
        None,
    ),
    (
        "mobilevit",
        "convolutions with strides and norms of batches",
        None,
    ),
    (
        "mobilevitv2",
        "convolutions with strides and norms of batches",
        None,
    ),
    (
        "modernvbert",
        "vision towers in front of an encoder",
        Some("modernbert"),
    ),
    (
        "molmo2",
        "attention that pools the patches of the tower",
        None,
    ),
    (
        "moonshine",
        "an encoder of the samples of a sound with a decoder of its own shape",
        None,
    ),
    (
        "moonshine_streaming",
        "an encoder of the samples of a sound with a decoder of its own shape",
        None,
    ),
    ("moshi", "several streams of audio codes", None),
    (
        "mra",
        "approximations of the matrix of attention",
        Some("bert"),
    ),
    ("musicgen", "several streams of audio codes", None),
    (
        "musicgen_melody",
        "several streams of audio codes",
        None,
    ),
    (
        "neomme",
        "vision towers in front of an encoder",
        Some("modernbert"),
    ),
    ("nllb-moe", "experts in an encoder and a decoder", None),
    (
        "nystromformer",
        "approximations of the matrix of attention",
        Some("bert"),
    ),
    (
        "ovis2",
        "a table of visual words that scores of patches weight",
        Some("qwen2"),
    ),
    (
        "parakeet_encoder",
        "the fields of an encoder alone, which a file of `parakeet_ctc` has as its `encoder_config`",
        None,
    ),
    (
        "pegasus_x",
        "an encoder whose blocks of tokens exchange learned rows",
        Some("pegasus"),
    ),
    (
        "perceiver",
        "learned rows that attend to inputs of any kind",
        None,
    ),
    (
        "perception_lm",
        "a tower of timm, whose layers the file does not give",
        None,
    ),
    (
        "phi4_multimodal",
        "a vision and an audio tower, with adapters of their own",
        Some("phi3"),
    ),
    (
        "pix2struct",
        "an encoder of patches whose rows and columns are tables, and biases of scores in its decoder alone",
        None,
    ),
    (
        "poolformer",
        "other layers in place of attention, in stages of different widths",
        None,
    ),
    (
        "pp_lcnet",
        "convolutions with strides and norms of batches",
        None,
    ),
    ("prophetnet", "several streams of predicted tokens", None),
    ("pvt", "convolutions before attention in each stage", None),
    (
        "pvt_v2",
        "convolutions before attention in each stage",
        None,
    ),
    (
        "qwen2_5_omni",
        "a model that speaks, behind the one that listens and writes (`thinker_config`)",
        Some("qwen2_5_omni_thinker"),
    ),
    (
        "qwen3_omni_moe",
        "a model that speaks, behind the one that listens and writes (`thinker_config`)",
        Some("qwen3_omni_moe_thinker"),
    ),
    (
        "qwen4_exp",
        "embeddings of n-grams, and residuals with gates",
        Some("qwen3_5_moe_text"),
    ),
    (
        "qwen4_exp_text",
        "embeddings of n-grams, and residuals with gates",
        Some("qwen3_5_moe_text"),
    ),
    (
        "reformer",
        "attention to buckets of hashes, and layers that are computed backward",
        None,
    ),
    (
        "regnet",
        "convolutions with strides and norms of batches",
        None,
    ),
    (
        "rembert",
        "embedded tokens of other widths at its beginning and its end",
        None,
    ),
    (
        "resnet",
        "convolutions with strides and norms of batches",
        None,
    ),
    (
        "roc_bert",
        "tables of the shapes and sounds of characters",
        Some("bert"),
    ),
    (
        "seamless_m4t",
        "encoders of text and audio (Conformer), and a model that makes audio codes",
        None,
    ),
    (
        "seamless_m4t_v2",
        "encoders of text and audio (Conformer), and a model that makes audio codes",
        None,
    ),
    (
        "segformer",
        "convolutions before attention in each stage",
        None,
    ),
    (
        "sew",
        "rows of a sound that pooling makes fewer before the blocks, and a layer makes more after them",
        None,
    ),
    (
        "sew-d",
        "rows of a sound that pooling makes fewer before the blocks, and a layer makes more after them",
        None,
    ),
    ("speech-encoder-decoder", "two models in one file", None),
    (
        "speech_to_text",
        "convolutions with gates over the frames of a sound",
        None,
    ),
    (
        "speecht5",
        "an encoder and a decoder of texts or sounds, with layers of their own before and after them",
        None,
    ),
    (
        "squeezebert",
        "convolutions of groups of channels in place of linear layers",
        Some("bert"),
    ),
    (
        "swiftformer",
        "other layers in place of attention, in stages of different widths",
        None,
    ),
    (
        "switch_transformers",
        "experts in an encoder and a decoder",
        None,
    ),
    (
        "t5gemma2",
        "a decoder whose attention sees itself and an encoder at once",
        None,
    ),
    (
        "tapas",
        "tables of rows, columns and ranks of cells",
        Some("bert"),
    ),
    (
        "textnet",
        "convolutions with strides and norms of batches",
        None,
    ),
    (
        "timm_wrapper",
        "a model of timm, whose layers the file does not give",
        None,
    ),
    (
        "trocr",
        "a decoder alone, which attends to the rows of a tower",
        None,
    ),
    (
        "udop",
        "places on a page and patches of its image among the tokens of an encoder",
        Some("t5"),
    ),
    (
        "ultrabert",
        "a narrow layer before its logits",
        Some("eurobert"),
    ),
    (
        "ultravbert",
        "vision towers in front of an encoder",
        Some("eurobert"),
    ),
    (
        "unlimited_ocr",
        "two vision towers, one of them with windows (SAM)",
        None,
    ),
    (
        "video_llava",
        "vision towers and videos",
        Some("llama"),
    ),
    ("vision-encoder-decoder", "two models in one file", None),
    (
        "xlnet",
        "two streams of attention and relative positions that layers project",
        None,
    ),
    ("xmod", "adapters for each language", Some("roberta")),
    (
        "yoso",
        "approximations of the matrix of attention",
        Some("bert"),
    ),
    (
        "zamba",
        "layers of Mamba with several heads, behind blocks that they share",
        Some("zamba2"),
    ),
    (
        "zaya",
        "convolutions of queries and keys, and routers with several layers",
        None,
    ),
    (
        "glm5_next",
        "linear attention, indexers and residual streams that are mixed",
        None,
    ),
    (
        "mistral_large4",
        "an indexer whose softmax is scaled by positions",
        None,
    ),
    (
        "minicpmv4_6",
        "a tower with attention to windows that merge",
        None,
    ),
    (
        "minicpmv4_7",
        "a tower with attention to windows that merge",
        None,
    ),
    (
        "voxtral_realtime",
        "norms of the language model that depend on a time",
        None,
    ),
    ("pi0", "a second model that makes actions", None),
    (
        "hyperclovax_vision_v2",
        "the tower of another model, as its file names it",
        Some("hyperclovax"),
    ),
];
