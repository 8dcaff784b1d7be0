// parse.h: PTX text -> kernels. A kernel that has an instruction which is not known
// cannot be launched, and says why.
#pragma once

#include <fstream>

#include "test/ptx/warp.h"

enum { SPECIALS = 13 };

// In the order in which block_special counts them.
static const char *const SPECIAL_NAMES[SPECIALS] = {
    "%tid.x",   "%tid.y",   "%tid.z",    "%ntid.x",   "%ntid.y",   "%ntid.z", "%ctaid.x",
    "%ctaid.y", "%ctaid.z", "%nctaid.x", "%nctaid.y", "%nctaid.z", "%laneid"};

struct Register {
    uint32_t place;
    int size; // bytes; 0: a predicate
};

// The kernel that is being read.
struct Parser {
    Operations operations;
    std::map<int, std::string> files; // of the CUDA source
    Kernel *kernel = nullptr;
    std::map<std::string, Register> registers;
    std::map<std::string, uint32_t> labels;
    std::vector<std::pair<size_t, std::string>> branches; // instruction, label
    const char *file = "?";
    int line = 0;
};

static inline std::string trimmed(const std::string &text) {
    size_t begin = text.find_first_not_of(" \t\r"), end = text.find_last_not_of(" \t\r");
    return begin == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}
static inline bool begins_with(const std::string &text, const char *start) {
    return text.compare(0, strlen(start), start) == 0;
}
static inline std::string before(const std::string &text, const char *mark) {
    return text.substr(0, text.find(mark));
}

// What makes the kernel one that cannot be run.
[[noreturn]] static inline void refuse(const std::string &why) { throw why; }

static inline int type_bytes(const std::string &type) {
    return type == "pred" ? 0 : atoi(type.c_str() + 1) / 8;
}

// Room for a register in the file of a warp.
static inline uint32_t register_room(Parser *parser, int size) {
    uint32_t place = parser->kernel->file_bytes;
    parser->kernel->file_bytes += size < 2 ? 64u : (uint32_t)size * LANES;
    return place;
}

static inline uint32_t constant_place(Parser *parser, uint64_t value, int size) {
    for (const Constant &known : parser->kernel->constants) {
        if (known.value == value && known.size == size) { return known.place; }
    }
    uint32_t place = register_room(parser, size);
    parser->kernel->constants.push_back({place, size, value});
    return place;
}

static inline uint64_t literal_value(const std::string &text, int size) {
    bool is_float = begins_with(text, "0f") || begins_with(text, "0d");
    uint64_t value = is_float         ? strtoull(text.c_str() + 2, nullptr, 16)
                     : text[0] == '-' ? (uint64_t)strtoll(text.c_str(), nullptr, 0)
                                      : strtoull(text.c_str(), nullptr, 0);
    return size == 0  ? (value != 0 ? ~UINT64_C(0) : 0)
           : size < 8 ? value & ((UINT64_C(1) << 8 * size) - 1)
                      : value;
}

// A register, a special register, a number or the address of shared memory; as a register
// of `size` bytes, of which it may have more where `real` takes how many they are.
static inline uint32_t operand_place(Parser *parser, const std::string &text, int size, int *real = nullptr) {
    auto found = parser->registers.find(text);
    if (found != parser->registers.end()) {
        int has = found->second.size;
        if (has != size && (real == nullptr || has < size)) { refuse("a register of another size: " + text); }
        if (real != nullptr) { *real = has; }
        return found->second.place;
    }
    for (int i = 0; i < SPECIALS; i++) {
        if (text != SPECIAL_NAMES[i]) { continue; }
        Register added = {register_room(parser, 4), 4};
        parser->registers[text] = added;
        parser->kernel->specials.push_back({added.place, i});
        return operand_place(parser, text, size, real);
    }
    if (real != nullptr) { *real = size; }
    for (const Parameter &parameter : parser->kernel->parameters) { // its address among them
        if (text == parameter.name) { return constant_place(parser, parameter.offset, size); }
    }
    if (text == "memory") { return constant_place(parser, SHARED_BASE, size); } // the name in cuda_shared()
    if (!isdigit(text[0]) && text[0] != '-') { refuse("an unknown operand: " + text); }
    return constant_place(parser, literal_value(text, size), size);
}

// "{a, b}, [c+8], d|e" -> a b c d e, and the offset 8, which only the last address has.
static inline std::vector<std::string> operand_list(const std::string &text, int64_t *offset) {
    std::vector<std::string> list;
    std::string part;
    for (char c : text + ",") {
        if (c != ',' && c != '|') {
            if (strchr("{}[] \t", c) == nullptr) { part += c; }
            continue;
        }
        size_t plus = part.find('+');
        if (plus != std::string::npos) {
            if (*offset != 0) { refuse("two addresses with offsets"); }
            *offset = strtoll(part.c_str() + plus + 1, nullptr, 0);
            part.resize(plus);
        }
        if (!part.empty()) { list.push_back(part); }
        part.clear();
    }
    return list;
}

// ld.global.v4.f32, st.shared.u16, ld.param.u64 ... Without a space an address is generic:
// here one of global memory, because no address of shared memory is made generic.
static inline void parse_memory(Parser *parser, Instruction *to, std::string name,
                                std::vector<std::string> list) {
    static const std::map<std::string, Handler *> ways = {{"ld.global", access_memory<false, false>},
                                                          {"st.global", access_memory<false, true>},
                                                          {"ld.shared", access_memory<true, false>},
                                                          {"st.shared", access_memory<true, true>},
                                                          {"ld.param", load_parameter}};
    if (isdigit((unsigned char)name[4])) { name.insert(2, ".global"); }
    size_t dot = name.find('.', 3);
    std::string space = name.substr(0, dot), type = name.substr(dot + 1);
    if (begins_with(type, "wb.")) { type = type.substr(3); } // how caches keep it
    to->count = 1;
    if (type[0] == 'v') {
        to->count = (uint8_t)(type[1] - '0');
        type = type.substr(3);
    }
    to->size = (uint8_t)type_bytes(type);
    to->is_signed = type[0] == 's';
    if (ways.count(space) == 0 || to->size == 0) { refuse("an unknown instruction: " + name); }
    to->run = ways.at(space);
    bool load = name[0] == 'l';
    if (list.size() != to->count + 1u) { refuse("another number of operands: " + name); }
    std::string address = load ? list.back() : list.front();
    list.erase(load ? list.end() - 1 : list.begin());
    to->in[4] = operand_place(parser, address, space == "ld.shared" || space == "st.shared" ? 4 : 8);
    for (size_t i = 0; i < list.size(); i++) {
        int width = 0;
        (load ? to->out : to->in)[i] = operand_place(parser, list[i], to->size < 2 ? 2 : to->size, &width);
        to->width = (uint8_t)width;
    }
}

// The operands of an operation of the table, of the sizes that it says.
static inline void parse_operation(Parser *parser, Instruction *to, const std::string &name,
                                   const std::vector<std::string> &list) {
    auto found = parser->operations.find(name);
    if (found == parser->operations.end()) { refuse("an unknown instruction: " + name); }
    const Operation &operation = found->second;
    to->run = operation.run;
    to->kind = operation.kind;
    if (list.size() + 1 != operation.sizes.size()) { refuse("another number of operands: " + to->text); }
    size_t colon = operation.sizes.find(':'), at = 0;
    for (size_t i = 0; i < operation.sizes.size(); i++) {
        if (i == colon) { continue; }
        int size = operation.sizes[i] == 'p' ? 0 : operation.sizes[i] - '0', real = size;
        bool lower =
            i > colon && begins_with(name, "cvt."); // conversions take the lower bits of what is wider
        uint32_t place = operand_place(parser, list[at++], size, lower ? &real : nullptr);
        if (real != size && (real != 8 || size != 4)) { refuse("half a register: " + to->text); }
        if (real != size) {
            Instruction half = *to;
            half.run = parser->operations["cvt.u32.u64"].run;
            half.in[0] = place;
            half.out[0] = place = register_room(parser, 4);
            parser->kernel->code.push_back(half);
        }
        (i < colon ? to->out[i] : to->in[i - colon - 1]) = place;
        to->members = place; // the last one
    }
    if (to->kind != PLAIN && to->guarded) { refuse("a guard before what a warp does together"); }
}

static inline void parse_instruction(Parser *parser, std::string text) {
    Instruction to;
    to.text = text;
    to.file = parser->file;
    to.line = parser->line;
    if (text[0] == '@') {
        size_t end = text.find_first_of(" \t"), begin = text[1] == '!' ? 2 : 1;
        to.guarded = true;
        to.negated = begin == 2;
        to.guard = operand_place(parser, text.substr(begin, end - begin), 0);
        text = trimmed(text.substr(end));
    }
    size_t space = text.find_first_of(" \t");
    std::string name = text.substr(0, space),
                rest = space == std::string::npos ? "" : trimmed(text.substr(space));
    std::vector<std::string> list = operand_list(rest, &to.offset);
    if (name == "bra" || name == "bra.uni") {
        to.kind = BRANCH;
        parser->branches.push_back({parser->kernel->code.size(), list[0]});
    } else if (name == "ret" || name == "exit") {
        to.kind = ENDING;
    } else if (begins_with(name, "ld.") || begins_with(name, "st.")) {
        parse_memory(parser, &to, name, list);
    } else {
        if (begins_with(name, "mov.") && rest.find('{') != std::string::npos) {
            name += rest[0] == '{' ? ".unpack" : ".pack";
        }
        if (begins_with(name, "shfl.") && rest.find('|') == std::string::npos) {
            parser->registers["%unused"] = {register_room(parser, 0), 0};
            list.insert(list.begin() + 1, "%unused");
        }
        parse_operation(parser, &to, name, list);
    }
    parser->kernel->code.push_back(to);
}

// .reg .b32 %r<14>, or .reg .b32 name
static inline void parse_registers(Parser *parser, const std::string &text) {
    size_t name_at = text.find_last_of(" \t") + 1, angle = text.find('<');
    std::string name = before(text.substr(name_at), "<");
    int size = type_bytes(before(trimmed(text.substr(4)).substr(1), " "));
    if (angle == std::string::npos) { parser->registers[name] = {register_room(parser, size), size}; }
    for (int i = 0; angle != std::string::npos && i < atoi(text.c_str() + angle + 1); i++) {
        parser->registers[name + std::to_string(i)] = {register_room(parser, size), size};
    }
}

static inline void parse_statement(Parser *parser, const std::string &text) {
    if (begins_with(text, ".reg")) {
        parse_registers(parser, text);
    } else if (begins_with(text, ".loc")) {
        int number = 0;
        sscanf(text.c_str(), ".loc %d %d", &number, &parser->line);
        parser->file = parser->files[number].c_str();
    } else if (text[0] != '.') {
        parse_instruction(parser, text);
    } else if (!begins_with(text, ".pragma")) {
        refuse("an unknown directive: " + text);
    }
}

// A line of a kernel's body: a label, .loc without a semicolon, or statements.
static inline void parse_line(Parser *parser, std::string text) {
    text = trimmed(before(text, "//"));
    if (text.empty()) { return; }
    if (text.back() == ':') {
        parser->labels[text.substr(0, text.size() - 1)] = (uint32_t)parser->kernel->code.size();
        return;
    }
    if (text[0] == '{' && text.back() == '}') { text = trimmed(text.substr(1, text.size() - 2)); }
    if (begins_with(text, ".loc")) { text += ";"; }
    if (text.back() != ';') { refuse("a statement that does not end: " + text); }
    for (size_t begin = 0, end; (end = text.find(';', begin)) != std::string::npos; begin = end + 1) {
        std::string statement = trimmed(text.substr(begin, end - begin));
        if (!statement.empty()) { parse_statement(parser, statement); }
    }
}

// .param .u64 name,   .param .align 8 .b8 name[56]   .param .u64 .ptr .align 1 name
static inline void parse_parameter(Kernel *kernel, std::string text) {
    if (text.back() == ',') { text.pop_back(); }
    size_t space = text.find_last_of(" \t"), align_at = text.find(".align");
    std::string name = text.substr(space + 1), type = trimmed(text.substr(0, space));
    bool pointer = type.find(".ptr") != std::string::npos; // its alignment is that of what it points to
    if (pointer) { type = trimmed(before(type, ".ptr")); }
    size_t size = (size_t)type_bytes(type.substr(type.find_last_of('.') + 1)), align = size;
    if (align_at != std::string::npos && !pointer) { align = (size_t)atoi(text.c_str() + align_at + 6); }
    size_t bracket = name.find('[');
    if (bracket != std::string::npos) { size *= (size_t)atoi(name.c_str() + bracket + 1); }
    size_t offset = (kernel->parameter_bytes + align - 1) / align * align;
    kernel->parameters.push_back({before(name, "["), offset, size});
    kernel->parameter_bytes = offset + size;
}

// Reads the kernel whose .entry is in `lines[at]`; the line behind it.
static inline size_t parse_kernel(Parser *parser, const std::vector<std::string> &lines, size_t at) {
    std::string entry = lines[at].substr(lines[at].find(".entry ") + 7), name = trimmed(before(entry, "("));
    Kernel *kernel = parser->kernel = &machine().kernels[name];
    kernel->name = name;
    parser->registers.clear();
    parser->labels.clear();
    parser->branches.clear();
    for (at++; trimmed(lines[at])[0] != '{'; at++) {
        std::string text = trimmed(lines[at]);
        if (begins_with(text, ".param")) { parse_parameter(kernel, text); }
        if (begins_with(text, ".maxntid")) { kernel->max_threads = (unsigned)atoi(text.c_str() + 8); }
    }
    for (at++; lines[at][0] != '}'; at++) {
        try {
            if (kernel->unknown.empty()) { parse_line(parser, lines[at]); }
        } catch (const std::string &why) { kernel->unknown = why + ", line " + std::to_string(at + 1); }
    }
    for (auto &[instruction, label] : parser->branches) {
        if (kernel->unknown.empty()) { kernel->code[instruction].target = parser->labels.at(label); }
    }
    return at;
}

static inline void machine_load(const char *path) {
    std::ifstream file(path);
    std::vector<std::string> lines;
    for (std::string line; std::getline(file, line);) { lines.push_back(line); }
    if (lines.empty()) { report_and_end("no PTX", path); }
    static Parser parser; // instructions point to the names of its files
    add_arithmetic(parser.operations);
    add_memory(parser.operations);
    add_together(parser.operations);
    // .file 3 "/path/kernels/cuda/gelu.cuh": behind the code that names it.
    for (const std::string &line : lines) {
        size_t quote = line.find('"'), kernels = line.find("kernels/");
        if (!begins_with(trimmed(line), ".file") || quote == std::string::npos) { continue; }
        size_t begin = kernels == std::string::npos ? quote + 1 : kernels;
        parser.files[atoi(trimmed(line).c_str() + 5)] = line.substr(begin, line.find('"', quote + 1) - begin);
    }
    for (size_t at = 0; at < lines.size(); at++) {
        if (lines[at].find(".entry ") != std::string::npos) { at = parse_kernel(&parser, lines, at); }
    }
}
