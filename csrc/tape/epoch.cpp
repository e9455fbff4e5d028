// Operators that run a whole epoch of training, or a validation, on a tape in one call, without Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "../cpu/step.h"
#include "objective.h"
#include "program.h"

namespace esper::tape {
namespace {

using StableTensor = torch::stable::Tensor;
using torch::stable::detail::to;

// Takes the arguments of an operator from its stack, in the order of its schema.
class Reader {
 public:
    explicit Reader(StableIValue* stack) : at_(stack) {}

    template <typename Type>
    Type take() {
        return to<Type>(*at_++);
    }
    OwnedList list() { return take_list(*at_++); }
    std::vector<OwnedTensor> tensors() {
        const OwnedList items = list();
        std::vector<OwnedTensor> result;
        for (int64_t n = 0; n < list_size(items); ++n) result.push_back(take_tensor(list_item(items, n)));
        return result;
    }
    template <typename Number>
    std::vector<Number> numbers() {
        const OwnedList items = list();
        std::vector<Number> result;
        for (int64_t n = 0; n < list_size(items); ++n) result.push_back(to<Number>(list_item(items, n)));
        return result;
    }
    StableIValue* rest() const { return at_; }
    void skip(int64_t arguments) { at_ += arguments; }

 private:
    StableIValue* at_;
};

bool on_cpu(const StableTensor& tensor) {
    return device_of(tensor).type == aoti_torch_device_type_cpu();
}

// Contiguous numbers of a tensor, of which there must be `count`; any number of them if it is negative.
template <typename Number>
Number* vector_of(AtenTensorHandle tensor, int32_t dtype, int64_t count, const char* what) {
    bool contiguous = false;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(tensor, &contiguous));
    check(dtype_code(tensor) == dtype && contiguous && (count < 0 || numel_of(tensor) == count) &&
              device_of(tensor).type == aoti_torch_device_type_cpu(),
          "tape: ", what, " has a wrong dtype, size, layout or device");
    return static_cast<Number*>(mutable_data(tensor));
}

Program take_program(Reader& reader) {
    const auto shapes = reader.take<StableTensor>();
    const auto code = reader.take<StableTensor>();
    const auto constants = reader.take<StableTensor>();
    const OwnedList tensors = reader.list(), gradients = reader.list(), gradient_of = reader.list();
    Program program = read_program(shapes, code, constants, tensors, gradients, gradient_of);
    program.held = {shapes, code, constants};
    read_sections(program, reader.list());
    check(program.has_numbers && !program.code.empty(), "tape: the program is empty");
    return program;
}

Objective take_objective(Reader& reader, bool is_double) {
    const auto loss = reader.take<int64_t>(), score = reader.take<int64_t>();
    const auto variance = reader.take<std::optional<StableTensor>>();
    return Objective(loss, score, variance, reader.take<double>(), is_double);
}

// Outputs of a sample in a value.
int64_t outputs_of(const Program& program, int64_t value) {
    const int64_t* shape = program.shapes + 3 * value;
    return shape[0] * shape[1] * shape[2];
}

// Samples [N, ...] of the program's first value, in any layout.
Samples samples_of(const StableTensor& x, const Program& program) {
    const int64_t* shape = program.shapes;
    const Dtype dtype = program.is_double ? Dtype::kFloat64 : Dtype::kFloat32;
    const bool vectors = x.dim() == 2 && shape[1] == 1 && shape[2] == 1 && x.size(1) == shape[0];
    const bool images = x.dim() == 4 && std::equal(shape, shape + 3, x.sizes().begin() + 1);
    check((vectors || images) && on_cpu(x) && dtype_of(x.get()) == dtype, "tape: samples of shape ", shape_of(x),
          " do not fit the network");
    Samples samples{x.const_data_ptr(), nullptr, {}};
    for (int64_t d = 0; d < x.dim(); ++d) samples.strides[d] = x.stride(d);
    return samples;
}

// The batches of an epoch.
class Batches {
 public:
    Batches(Reader& reader, const Program& program)
        : x_(reader.take<StableTensor>()),
          y_(reader.take<StableTensor>()),
          table_(reader.take<std::optional<StableTensor>>()),
          staged_(reader.take<std::optional<StableTensor>>()),
          order_(reader.take<StableTensor>()),
          size_(reader.take<int64_t>()) {
        const auto seed = reader.take<int64_t>(), epoch = reader.take<int64_t>(), padding = reader.take<int64_t>();
        const bool flip = reader.take<bool>();
        check(table_.has_value() == staged_.has_value(), "tape: images in bytes need a table and room for a batch");
        const int64_t rows = x_.size(0);
        rows_ = vector_of<int64_t>(order_.get(), aoti_torch_dtype_int64(), -1, "the order");
        check(size_ > 0, "tape: a batch is empty");
        for (int64_t n = 0; n < count() * size_; ++n) {
            check(rows_[n] >= 0 && rows_[n] < rows, "tape: sample ", rows_[n], " is outside 0..", rows - 1);
        }
        if (table_) {
            images_ = stage_batch::read_images(x_, order_, *table_, std::nullopt, seed, epoch, 0, std::nullopt, padding,
                                               flip, *staged_, std::nullopt);
            check(staged_->size(0) == size_, "tape: the room for a batch has another size");
        }
        samples_ = samples_of(table_ ? *staged_ : x_, program);
    }

    int64_t count() const { return order_.numel() / size_; }
    int64_t size() const { return size_; }
    const StableTensor& targets() const { return y_; }
    int64_t samples() const { return x_.size(0); }
    // Rows of the samples of batch `number`.
    const int64_t* rows(int64_t number) const { return rows_ + number * size_; }

    // Makes batch `number` the current one.
    Samples choose(int64_t number) {
        if (table_) {
            images_.selection.first = number * size_;
            stage_batch::stage(images_);
        } else {
            samples_.rows = rows(number);
        }
        return samples_;
    }

 private:
    StableTensor x_, y_;
    std::optional<StableTensor> table_, staged_;
    StableTensor order_;
    int64_t size_;
    int64_t* rows_ = nullptr;
    stage_batch::Images images_{};
    Samples samples_{};
};

// Learning rates as esper.training.warmup sets them in each step: the first is that of the host, a factor times
// min(1, step / steps); others are factors of the host's.
class Rates {
 public:
    explicit Rates(Reader& reader)
        : tensors_(reader.tensors()),
          factors_(reader.numbers<double>()),
          steps_(reader.numbers<int64_t>()),
          done_(reader.numbers<int64_t>()) {
        const size_t count = tensors_.size();
        check(count > 0 && factors_.size() == count && steps_.size() == count && done_.size() == count,
              "tape: each learning rate needs a factor, steps and those done");
        is_double_ = dtype_code(tensors_[0].get()) == aoti_torch_dtype_float64();
        const int32_t dtype = is_double_ ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
        for (const OwnedTensor& tensor : tensors_) {
            numbers_.push_back(vector_of<void>(tensor.get(), dtype, 1, "a learning rate"));
        }
    }

    void step() {
        if (is_double_) return step_in<double>();
        step_in<float>();
    }

 private:
    template <typename Real>
    void step_in() {
        const auto* host = static_cast<const Real*>(numbers_[0]);
        for (size_t n = 0; n < numbers_.size(); ++n) {
            Real rate = static_cast<Real>(factors_[n]);
            if (n > 0) rate = *host * rate;
            if (steps_[n] > 0) {
                done_[n] += 1;
                rate *= std::min(static_cast<Real>(done_[n]) / static_cast<Real>(steps_[n]), Real{1});
            }
            *static_cast<Real*>(numbers_[n]) = rate;
        }
    }

    std::vector<OwnedTensor> tensors_;
    std::vector<double> factors_;
    std::vector<int64_t> steps_;
    std::vector<int64_t> done_;
    std::vector<void*> numbers_;
    bool is_double_ = false;
};

// Statistics and clipping of the gradients of owners: the host, then seeds. See esper/training/step.py.
class Owners {
 public:
    explicit Owners(Reader& reader)
        : flags_(reader.tensors()), joined_(reader.numbers<int64_t>()), sums_(reader.take<StableTensor>()) {
        for (const OwnedTensor& flag : flags_) {
            finite_.push_back(vector_of<bool>(flag.get(), aoti_torch_dtype_bool(), 1, "a seed's flag"));
        }
    }

    void take_gradients(Reader& reader) {
        gradients_ = grad_stats::read_arguments(reader.rest(), nullptr);
        reader.skip(4);
        const size_t owners = gradients_.group_sizes.size();
        check(finite_.size() + 1 == owners && joined_.size() == owners, "tape: each owner needs a flag");
        fields_.resize(owners * kFields);
        norms_.resize(gradients_.gradients.size());
        total_ = vector_of<double>(sums_.get(), aoti_torch_dtype_float64(),
                                   static_cast<int64_t>(owners * (kFields + 1)), "the sums of statistics");
    }

    size_t count() const { return finite_.size() + 1; }

    // Measures the gradients of a batch, and adds what was found to the sums.
    void measure() {
        grad_stats::compute(gradients_, fields_.data(), norms_.data());
        double square = 0;
        int64_t together = 0;
        for (size_t n = 0; n < count(); ++n) {
            if (joined_[n] == 0) continue;
            square += field(n, grad_stats::kSumSq);
            together += 1;
        }
        if (together > 1) {
            const double norm = std::sqrt(square);
            double coefficient = std::min(gradients_.max_norm / (norm + grad_stats::kClipEpsilon), 1.0);
            if (!std::isfinite(norm)) coefficient = 0;
            for (size_t n = 0; n < count(); ++n) {
                if (joined_[n] != 0) field(n, grad_stats::kClipCoef) = coefficient;
            }
        }
        for (size_t n = 0; n < count(); ++n) {
            for (size_t f = 0; f < kFields; ++f) total_[n * (kFields + 1) + f] += fields_[n * kFields + f];
        }
    }
    double coefficient(size_t owner) { return field(owner, grad_stats::kClipCoef); }
    void mark() {
        for (size_t n = 1; n < count(); ++n) *finite_[n - 1] = *finite_[n - 1] && coefficient(n) > 0;
    }

 private:
    static constexpr size_t kFields = grad_stats::kFieldCount;
    double& field(size_t owner, grad_stats::Field name) { return fields_[owner * kFields + static_cast<size_t>(name)]; }

    std::vector<OwnedTensor> flags_;
    std::vector<int64_t> joined_;  // whether an owner is clipped together with the host
    StableTensor sums_;
    std::vector<bool*> finite_;
    grad_stats::Arguments gradients_{};
    std::vector<double> fields_, norms_;
    double* total_ = nullptr;
};

// One epoch; the optimizer's arguments are the rest of the stack.
template <typename Arguments>
void run_epoch(StableIValue* stack, Arguments (*read_optimizer)(StableIValue*), void (*step)(const Arguments&)) {
    Reader reader(stack);
    const Program program = take_program(reader);
    Batches batches(reader, program);
    const Objective objective = take_objective(reader, program.is_double);
    for (const int64_t output : program.ends) {
        objective.check_targets(batches.targets(), batches.samples(), outputs_of(program, output));
    }
    Targets targets(batches.targets(), objective.target_bytes(outputs_of(program, program.ends[0])));
    const auto totals = reader.take<StableTensor>();
    double* const sums =
        vector_of<double>(totals.get(), aoti_torch_dtype_float64(), cross_entropy::kFieldCount, "totals");
    Rates rates(reader);
    Owners owners(reader);
    const auto* cancelled = reinterpret_cast<const std::atomic<bool>*>(reader.take<int64_t>());
    const auto progress = reader.take<StableTensor>();
    auto* const done = vector_of<int64_t>(progress.get(), aoti_torch_dtype_int64(), 1, "the progress");
    const auto coefficients = reader.take<StableTensor>();
    owners.take_gradients(reader);
    const Arguments optimizer = read_optimizer(reader.rest());
    const int64_t groups = static_cast<int64_t>(optimizer.groups.size());
    auto* const coefficient = vector_of<double>(coefficients.get(), aoti_torch_dtype_float64(), groups, "coefficients");
    const auto of_owner = static_cast<int64_t>(optimizer.groups.size() / owners.count());
    check(of_owner * static_cast<int64_t>(owners.count()) == groups, "tape: owners differ in their parameter groups");

    const std::unique_ptr<Runner> runner = make_runner(program, batches.size(), true, true, false);
    std::vector<double> outputs, gradient;  // room for float, too
    for (int64_t number = 0; number < batches.count(); ++number) {
        *done = number;
        if (cancelled != nullptr && cancelled->load(std::memory_order_relaxed)) return;
        rates.step();
        runner->load(batches.choose(number), batches.size());
        const void* const wanted = targets.of(batches.rows(number), batches.size());
        for (int64_t s = 0; s < static_cast<int64_t>(program.ends.size()); ++s) {
            const int64_t output = program.ends[static_cast<size_t>(s)];
            const int64_t width = outputs_of(program, output);
            outputs.resize(static_cast<size_t>(batches.size() * width));
            gradient.resize(outputs.size());
            runner->forward(s);
            runner->read(output, outputs.data());
            const bool learns = runner->learns(s);
            objective.measure(outputs.data(), wanted, batches.size(), width, s == 0 ? sums : nullptr, nullptr,
                              learns ? gradient.data() : nullptr);
            if (learns) runner->backward(s, gradient.data());
        }
        owners.measure();
        for (int64_t g = 0; g < groups; ++g) coefficient[g] = owners.coefficient(static_cast<size_t>(g / of_owner));
        step(optimizer);
        owners.mark();
    }
    *done = batches.count();
}

void epoch_sgd(StableIValue* stack, uint64_t, uint64_t) {
    run_epoch<sgd::Arguments>(stack, sgd::read_arguments, sgd::step_all);
}

void epoch_adamw(StableIValue* stack, uint64_t, uint64_t) {
    run_epoch<adamw::Arguments>(stack, adamw::read_arguments, adamw::step_all);
}

// Scores of samples in several configurations, each an output of the program.
void measure_samples(StableIValue* stack, uint64_t, uint64_t) {
    Reader reader(stack);
    const Program program = take_program(reader);
    const auto values = reader.numbers<int64_t>();
    const auto x = reader.take<StableTensor>();
    const auto y = reader.take<StableTensor>();
    const Objective objective = take_objective(reader, program.is_double);
    const auto block = reader.take<StableTensor>();
    const auto scores = reader.take<StableTensor>();
    const auto size = reader.take<int64_t>();
    const int64_t samples = x.size(0), count = static_cast<int64_t>(values.size());
    for (const int64_t value : values) {
        check(value >= 0 && value < program.values, "tape: an output is no value");
        objective.check_targets(y, samples, outputs_of(program, value));
    }
    check(count > 0, "tape: there is no output");
    const Targets targets(y, objective.target_bytes(outputs_of(program, values[0])));
    auto* const sums =
        vector_of<double>(block.get(), aoti_torch_dtype_float64(), count * cross_entropy::kFieldCount, "the sums");
    check(dtype_code(scores.get()) == objective.score_dtype() && scores.dim() == 2 && scores.size(0) == count &&
              scores.size(1) == samples && scores.stride(1) == 1 && on_cpu(scores),
          "tape: the scores must be [K, N], uint8 for classes and else float32");
    check(size > 0, "tape: a batch is empty");
    auto* const score = static_cast<char*>(scores.mutable_data_ptr());
    Samples batch = samples_of(x, program);
    const size_t bytes = program.is_double ? sizeof(double) : sizeof(float);

    const std::unique_ptr<Runner> runner = make_runner(program, std::min(size, samples), false, false, false);
    std::vector<double> outputs;
    // The call counts as one batch.
    for (int64_t k = 0; k < count; ++k) sums[k * cross_entropy::kFieldCount + cross_entropy::kBatches] += 1;
    for (int64_t first = 0; first < samples; first += size) {
        const int64_t rows = std::min(size, samples - first);
        runner->load(batch, rows);
        batch.data = static_cast<const char*>(batch.data) + static_cast<size_t>(size * batch.strides[0]) * bytes;
        runner->forward(0);
        for (int64_t k = 0; k < count; ++k) {
            const int64_t value = values[static_cast<size_t>(k)];
            const int64_t width = outputs_of(program, value);
            outputs.resize(static_cast<size_t>(rows * width));
            runner->read(value, outputs.data());
            double* row = sums + k * cross_entropy::kFieldCount;
            const auto place = static_cast<size_t>(k * scores.stride(0) + first);
            objective.measure(outputs.data(), targets.from(first), rows, width, row,
                              score + place * objective.score_bytes(), nullptr);
            row[cross_entropy::kBatches] -= 1;
        }
    }
}

}  // namespace
}  // namespace esper::tape

STABLE_TORCH_LIBRARY_IMPL(esper, CPU, m) {
    m.impl("tape_epoch_sgd_", &esper::tape::epoch_sgd);
    m.impl("tape_epoch_adamw_", &esper::tape::epoch_adamw);
    m.impl("tape_scores_", &esper::tape::measure_samples);
}
